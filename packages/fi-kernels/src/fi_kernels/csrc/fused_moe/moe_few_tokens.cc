// moe_few_tokens: checks the arguments, shares a layer of few tokens out over all CTAs or runs the CPU kernel.
#include <algorithm>
#include <cmath>

#include "fi/fused_moe/moe_few_tokens.h"
#include "fi/generated/moe_few_tokens.h"
#include "fi/host/steps.h"

#if !FI_CUDA
#include "fi/fused_moe/moe_few_tokens_cpu.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// Features or rows of a work tile for `count` of each of `groups`, so that the CTA with most tiles has least work;
// units are warps that share a line of 8 features. The constants are those of an H200: a unit costs as much as 4.5 full
// rows, a tile two more (256 experts of 512 x 2048, two tokens: 27.7 us with tiles of 64, 34.8 with 9).
struct WorkTile {
  int64_t size, units;
};
WorkTile work_tile(double groups, int64_t count, int64_t most, int64_t ctas) {
  WorkTile best{1, 1};
  double least = 1e30;
  for (int64_t size = 1; size <= most; ++size) {
    int64_t units = 1;
    while (units * 8 < size) units *= 2;
    const auto tiles = static_cast<double>((count + size - 1) / size);
    const double of_cta = std::ceil(groups * tiles / static_cast<double>(ctas));
    const double cost = of_cta * (std::max(static_cast<double>(size), 4.5 * static_cast<double>(units)) + 2);
    if (cost < least) least = cost, best = {size, units};
  }
  return best;
}

FewTokensProduct product(const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias, bool fp8) {
  FewTokensProduct g{};
  const int64_t bytes = weight.dtype().bytes();
  g.weight = static_cast<const char*>(weight.data());
  g.scale = scale ? scale.data<float>() : nullptr;
  g.bias = bias ? bias.data() : nullptr;
  g.expert_bytes = weight.stride(0) * bytes;
  g.row_bytes = weight.stride(1) * bytes;
  g.scale_expert_stride = scale ? scale.stride(0) : 0;
  g.scale_row_stride = scale ? static_cast<int32_t>(scale.stride(1)) : 0;
  g.bias_row_stride = bias ? bias.stride(0) : 0;
  g.lines = static_cast<int32_t>((weight.size(2) * bytes + kLineBytes - 1) / kLineBytes);
  g.pitch = few_tokens_pitch(g.lines, static_cast<int32_t>(kLineBytes / bytes), fp8);
  return g;
}
#endif

void check_scale(const OptionalTensor& scale, const Tensor& weight, bool fp8) {
  FI_CHECK(bool(scale) == fp8, ValueError, "%s must come with float8_e4m3fn weights, and only with them", scale.name());
  if (!scale) return;
  FI_CHECK(weight.size(1) % 128 == 0 && weight.size(2) % 128 == 0, ValueError,
           "%s must have multiples of 128 rows and columns for its scales; got %s", weight.name(),
           weight.shape_str().c_str());
  Dim experts{"experts", weight.size(0)}, row_blocks{"row blocks", weight.size(1) / 128},
      blocks{"column blocks", weight.size(2) / 128};
  scale.is({kF32}).on(weight).inner_contiguous().shape(experts, row_blocks, blocks);
}

MoeFewTokensRequest request_of(const MoeFewTokensArgs& a) {
  return {a.x.dtype(), a.up.dtype(), static_cast<MoeFewTokensRequest::Activation>(a.activation)};
}

void moe_few_tokens(const Kernel& kernel, const MoeFewTokensArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, hidden{"hidden"}, width{"width"}, top_k{"top_k"}, experts{"experts"};
  a.x.is({kF16, kBF16}).inner_contiguous().shape(tokens, hidden);
  a.out.like(a.x).inner_contiguous().shape(tokens, hidden);
  a.ids.is({kI32}).on(a.x).contiguous().shape(tokens, top_k);
  if (a.weights) a.weights.is({kF32}).on(a.x).contiguous().shape(tokens, top_k);
  Dim slots{"tokens * top_k", tokens * top_k};
  a.activated.like(a.x).contiguous().shape(slots, width);
  Dim columns{"2 * width", width * 2};
  a.up.is({kF16, kBF16, kE4M3}).on(a.x).inner_contiguous().shape(experts, columns, hidden);
  a.down.like(a.up).inner_contiguous().shape(experts, hidden, width);
  const bool fp8 = a.up.dtype() == kE4M3;
  if (!fp8) a.up.like(a.x);
  check_scale(a.up_scale, a.up, fp8);
  check_scale(a.down_scale, a.down, fp8);
  if (a.bias) a.bias.like(a.x).inner_contiguous().shape(experts, columns);
  if (a.delta) a.delta.like(a.x).inner_contiguous().shape(slots, columns);
  if (a.down_bias) a.down_bias.like(a.x).inner_contiguous().shape(experts, hidden);
  for (const OptionalTensor& constant : {a.alpha, a.beta, a.limit})
    if (constant) constant.is({kF32}).on(a.x).contiguous().shape(experts);
  FI_CHECK(tokens <= kFewTokens && slots <= kFewSlots && top_k <= kFewTopK, ValueError,
           "ids must be of at most %d tokens with at most %d experts, %d in all; got %s", kFewTokens, kFewTopK,
           kFewSlots, a.ids.shape_str().c_str());
  FI_CHECK(experts >= 1 && experts <= kFewExperts && hidden >= 8 && width >= 8 && hidden % 8 == 0 && width % 8 == 0 &&
               hidden <= 1 << 20 && width <= 1 << 20,
           ValueError, "up must be of 1 to %d experts, with multiples of 8 rows and columns; got %s", kFewExperts,
           a.up.shape_str().c_str());
  FI_CHECK(a.first_expert >= 0 && a.first_expert < 1 << 24, ValueError, "first_expert must be in 0..2^24 - 1; got %lld",
           static_cast<long long>(a.first_expert));
  if (tokens == 0) return;

  // 2 shape
#if FI_CUDA
  for (const Tensor& t : {a.x, a.activated})
    FI_CHECK(t.row_alignment(16) == 16, ValueError, "%s must have rows that are 16-byte aligned; got stride %lld",
             t.name(), static_cast<long long>(t.stride(0)));
  for (const Tensor& t : {a.up, a.down})
    FI_CHECK(t.alignment(16, {t.stride(0), t.stride(1)}) == 16, ValueError,
             "%s must have rows that are 16-byte aligned; got strides %lld, %lld", t.name(),
             static_cast<long long>(t.stride(0)), static_cast<long long>(t.stride(1)));
  MoeFewTokensParams p{};
  p.x = a.x.data();
  p.ids = a.ids.data<int32_t>();
  p.weights = a.weights ? a.weights.data<float>() : nullptr;
  p.out = a.out.data();
  p.activated = a.activated.data();
  p.delta = a.delta ? a.delta.data() : nullptr;
  p.delta_row_stride = a.delta ? a.delta.stride(0) : 0;
  p.up = product(a.up, a.up_scale, a.bias, fp8);
  p.down = product(a.down, a.down_scale, a.down_bias, fp8);
  const auto floats = [](const OptionalTensor& t) { return t ? t.data<float>() : nullptr; };
  p.alpha = floats(a.alpha);
  p.beta = floats(a.beta);
  p.limit = floats(a.limit);
  p.constants = {static_cast<float>(a.alpha_value), static_cast<float>(a.beta_value),
                 static_cast<float>(a.limit_value)};
  p.x_row_stride = a.x.stride(0);
  p.out_row_stride = a.out.stride(0);
  p.tokens = static_cast<int32_t>(tokens);
  p.top_k = static_cast<int32_t>(top_k);
  p.hidden = static_cast<int32_t>(hidden);
  p.width = static_cast<int32_t>(width);
  p.experts = static_cast<int32_t>(experts);
  p.first_expert = static_cast<int32_t>(a.first_expert);
  const Entry& entry = kernel.entries.front();
  const int64_t rows = std::max<int64_t>(tokens * p.up.pitch, slots * p.down.pitch);
  const int64_t scales = fp8 ? 4 * kFewTokens * std::max<int64_t>(p.up.lines, slots * p.down.lines) : 0;
  const int64_t most = MoeFewTokensConfig::of(entry).row_bytes;
  FI_CHECK(rows + scales <= most, ValueError, "x and activated must take at most %lld bytes of shared memory; got %lld",
           static_cast<long long>(most), static_cast<long long>(rows + scales));
  Launch launch{kernel.multiprocessors(a.x.device())};
  const auto here = static_cast<double>(experts);
  const double active =
      here * (1 - std::pow(1 - 1 / here, static_cast<double>(std::max<int64_t>(1, a.expected_slots))));
  const WorkTile features = work_tile(std::max(1.0, std::round(active)), width, kFewFeatures, launch.grid_x);
  p.features = static_cast<int32_t>(features.size);
  p.unit = static_cast<int32_t>((features.size + features.units - 1) / features.units);
  p.k_warps = static_cast<int32_t>(kFewWarps / features.units);
  p.rows = static_cast<int32_t>(work_tile(1, hidden, 16, launch.grid_x).size);
  p.feature_tiles = (p.width + p.features - 1) / p.features;
  p.row_tiles = (p.hidden + p.rows - 1) / p.rows;

  // 3 launch
  launch.pdl = kernel.pdl(a.enable_pdl);
  launch.cooperative = true;
  kernel.launch(entry, launch, a.x.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  cpu::few_tokens(a);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_few_tokens, fi::request_of)
FI_STEPS
