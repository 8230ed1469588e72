// moe_experts: checks the arguments, launches the Hopper kernel for few tokens an expert or runs the CPU one.
#include <algorithm>

#include "fi/fused_moe/moe_experts.h"
#include "fi/generated/moe_experts.h"
#include "fi/host/contents.h"

#if !FI_CUDA
#include "fi/fused_moe/moe_experts_cpu.h"
#endif

namespace fi {
namespace {

// rows, columns: of the weight; its scales are of 128 x 128 (e4m3) or of 32 columns (mxfp4).
void check_scale(const OptionalTensor& scale, const Tensor& weight, int64_t rows, int64_t columns) {
  const bool fp8 = weight.dtype() == kE4M3, fp4 = weight.dtype() == kU8;
  FI_CHECK(bool(scale) == (fp8 || fp4), ValueError,
           "%s must come with float8_e4m3fn or 4-bit weights, and only with them", scale.name());
  if (!scale) return;
  const int64_t block_rows = fp8 ? 128 : 1, block = fp8 ? 128 : 32;
  FI_CHECK(rows % block_rows == 0 && columns % block == 0, ValueError,
           "%s must have multiples of %lld rows and %lld columns for its scales; got %s", weight.name(),
           static_cast<long long>(block_rows), static_cast<long long>(block), weight.shape_str().c_str());
  Dim experts{"experts", weight.size(0)}, row_blocks{"row blocks", rows / block_rows},
      blocks{"column blocks", columns / block};
  scale.is({fp8 ? kF32 : kU8}).on(weight).inner_contiguous().shape(experts, row_blocks, blocks);
}

// [experts, rows, k], or [experts, k / b, rows, b] with b of 128 bytes.
void check_shape(const Tensor& weight, Dim& experts, Dim& rows, int64_t k) {
  Dim columns{"k", k};
  if (weight.ndim() != 4) return void(weight.shape(experts, rows, columns));
  Dim of_block{"k of 128 bytes", 128 / weight.dtype().bytes()}, blocks{"k / 128 bytes", k / of_block};
  FI_CHECK(k % of_block == 0, ValueError, "%s must have blocks of 128 bytes of %lld columns; got %s", weight.name(),
           static_cast<long long>(k), weight.shape_str().c_str());
  weight.contiguous().shape(experts, blocks, rows, of_block);
}

#if FI_CUDA
// Describes a weight for boxes of 128 bytes by `box_rows`, of which 8 of each of two halves lie side by side.
void describe(const Kernel& kernel, ExpertGemm& g, const Tensor& weight, int64_t box_rows) {
  const int64_t bytes = weight.dtype().bytes(), halves = g.gated ? 2 : 1;
  const int outer = g.k_apart ? 1 : 0;
  const auto row = static_cast<uint64_t>(weight.stride(-2) * bytes);
  const int64_t count = weight.size(0) * (outer ? weight.size(1) : 1);
  const uint64_t sizes[] = {static_cast<uint64_t>(weight.size(-1)), 8, static_cast<uint64_t>(halves),
                            static_cast<uint64_t>(g.features / 8), static_cast<uint64_t>(count)};
  const uint64_t strides[] = {row, row * static_cast<uint64_t>(g.order.paired ? 8 : g.features),
                              row * (g.order.paired ? 16 : 8),
                              static_cast<uint64_t>(count > 1 ? weight.stride(outer) * bytes : 128)};
  const uint32_t box[] = {static_cast<uint32_t>(128 / bytes), 8, static_cast<uint32_t>(halves),
                          static_cast<uint32_t>(box_rows / 8 / halves), 1};
  kernel.describe(g.weights, bytes, 5, weight.data(), sizes, strides, box);
}

ExpertGemm product(const Tensor& out, const Tensor& in, const Tensor& weight, const OptionalTensor& scale,
                   int64_t features, RowOrder order) {
  ExpertGemm g{};
  g.order = order;
  g.k_apart = weight.ndim() == 4;
  g.out = out.data();
  g.in = in.data();
  g.weight_scale = scale ? scale.data() : nullptr;
  g.in_row_stride = in.stride(0);
  g.out_row_stride = out.stride(0);
  g.weight_scale_expert_stride = scale ? scale.stride(0) : 0;
  g.weight_scale_row_stride = scale ? scale.stride(1) : 0;
  g.features = static_cast<int32_t>(features);
  g.k = static_cast<int32_t>(in.size(1));
  g.k_blocks = static_cast<int32_t>(g.k_apart ? weight.size(1) : (weight.size(2) * weight.dtype().bytes() + 127) / 128);
  return g;
}

// NVIDIA H200: weights that are to be evicted first stream faster below this size.
constexpr double kEvictFirstBytes = 200 << 20;
// NVIDIA H200: up to here tiles of 64 weight rows are as fast as those of 128, or faster (_FEW_SLOTS_TILE).
constexpr int64_t kFewSlots = 16;

// Outside of batch_invariant() moe_few_tokens computes most layers of 16-bit weights with so few slots.
const Entry& tile(const Kernel& kernel, int64_t slots, bool fp8) {
  return slots <= kFewSlots && (fp8 || batch_invariant()) ? kernel.entries.front() : kernel.entries.back();
}
#endif

// A tile holds as many tokens as are expected, in steps; fewer of mxfp4, whose weights take registers too.
MoeExpertsRequest request_of(const MoeExpertsArgs& a) {
  const int64_t most = a.up.dtype() == kU8 ? 32 : 64;
  int64_t tokens = 8;
  while (tokens < std::min(a.expected_tokens, most)) tokens *= 2;
  return {a.x.dtype(), a.up.dtype(), static_cast<MoeExpertsRequest::Activation>(a.activation), tokens};
}

void moe_experts(const Kernel& kernel, const MoeExpertsArgs& a) {
  // 1 check
  const bool gated = is_gated(static_cast<ExpertActivation>(a.activation));
  Dim tokens{"tokens"}, hidden{"hidden"}, width{"width"}, slots{"slots"}, experts{"experts"};
  a.x.is({kF16, kBF16}).inner_contiguous().shape(tokens, hidden);
  a.out.like(a.x).inner_contiguous().shape(slots, hidden);
  a.activated.like(a.x).inner_contiguous().shape(slots, width);
  Dim columns{gated ? "2 * width" : "width", width * (gated ? 2 : 1)};
  a.up.is({kF16, kBF16, kE4M3, kU8}).on(a.x).inner_contiguous();
  if (a.up.dtype().bits == 16) a.up.like(a.x);
  const int64_t packed = a.up.dtype() == kU8 ? 2 : 1;  // values of an element
  check_shape(a.up, experts, columns, hidden / packed);
  check_shape(a.down.like(a.up).inner_contiguous(), experts, hidden, width / packed);
  FI_CHECK(a.shuffle_tile == 0 || (a.shuffle_tile == 64 && packed == 1) ||
               (a.shuffle_tile == 128 && a.up.dtype().bits == 16),
           ValueError, "shuffle_tile must be 0, 64 for 8- and 16-bit weights or 128 for 16-bit ones; got %lld",
           static_cast<long long>(a.shuffle_tile));
  FI_CHECK(a.shuffle_tile == 0 || (columns % a.shuffle_tile == 0 && hidden % a.shuffle_tile == 0), ValueError,
           "up and down must have multiples of shuffle_tile %lld rows; got %s and %s",
           static_cast<long long>(a.shuffle_tile), a.up.shape_str().c_str(), a.down.shape_str().c_str());
  Dim ends{"experts + 1", experts + 1}, counters{"counters"};
  a.offsets.is({kI32}).on(a.x).contiguous().shape(ends);
  a.rows.is({kI32}).on(a.x).contiguous().shape(slots);
  a.progress.is({kI32}).on(a.x).contiguous().shape(counters);
  FI_CHECK(counters > kMaxExpertPasses, ValueError, "progress must have more than %d elements; got %lld",
           kMaxExpertPasses, static_cast<long long>(counters));
  FI_CHECK(experts >= 1 && experts <= kMaxExperts && hidden >= 8 && width >= 8 && hidden % 8 == 0 && width % 8 == 0 &&
               hidden <= 1 << 24 && width <= 1 << 24 && slots <= 1 << 24,
           ValueError, "up and down must be of 1 to %d experts, with multiples of 8 rows and columns; got %s and %s",
           kMaxExperts, a.up.shape_str().c_str(), a.down.shape_str().c_str());
  check_scale(a.up_scale, a.up, columns, hidden);
  check_scale(a.down_scale, a.down, hidden, width);
  if (a.bias) a.bias.like(a.x).inner_contiguous().shape(experts, columns);
  if (a.delta) a.delta.like(a.x).inner_contiguous().shape(slots, columns);
  for (const OptionalTensor& constant : {a.alpha, a.beta, a.limit})
    if (constant) constant.is({kF32}).on(a.x).contiguous().shape(experts);
  FI_CHECK(bool(a.sum) == bool(a.ids), ValueError, "sum and ids must be given together");
  if (a.sum) {
    Dim top_k{"top_k"};
    a.sum.like(a.x).inner_contiguous().shape(tokens, hidden);
    a.ids.is({kI32}).on(a.x).contiguous().shape(tokens, top_k);
    FI_CHECK(tokens * top_k == slots, ValueError, "ids must have the %lld elements of rows; got %s",
             static_cast<long long>(slots), a.ids.shape_str().c_str());
    if (a.weights) a.weights.is({kF32}).on(a.x).contiguous().shape(tokens, top_k);
    if (a.down_bias) a.down_bias.like(a.x).inner_contiguous().shape(experts, hidden);
    FI_CHECK(slots <= kMaxSlots && hidden / kSummedFeatures < counters - kMaxSlots, ValueError,
             "ids must have at most %d elements, and progress more than %lld; got %s and %lld", kMaxSlots,
             static_cast<long long>(kMaxSlots + hidden / kSummedFeatures), a.ids.shape_str().c_str(),
             static_cast<long long>(counters));
    FI_CHECK(a.first_expert >= 0 && a.first_expert < 1 << 24, ValueError,
             "first_expert must be in 0..2^24 - 1; got %lld", static_cast<long long>(a.first_expert));
  }
  if (slots == 0) return;
  if (kernel.checks_contents(a.x.device())) check_offsets(Integers(kernel, a.offsets), slots);

  // 2 shape
  ExpertGemmParams p{};
  const auto floats = [](const OptionalTensor& t) { return t ? t.data<float>() : nullptr; };
  p.offsets = a.offsets.data<int32_t>();
  p.progress = a.progress.data<int32_t>();
  p.delta = a.delta ? a.delta.data() : nullptr;
  p.delta_row_stride = a.delta ? a.delta.stride(0) : 0;
  p.alpha = floats(a.alpha);
  p.beta = floats(a.beta);
  p.limit = floats(a.limit);
  p.constants = {static_cast<float>(a.alpha_value), static_cast<float>(a.beta_value),
                 static_cast<float>(a.limit_value)};
  p.experts = static_cast<int32_t>(experts);
  if (a.sum) {
    ExpertSlots& s = p.slots;
    s.ids = a.ids.data<int32_t>();
    s.weights = floats(a.weights);
    s.sum = a.sum.data();
    s.bias = a.down_bias ? a.down_bias.data() : nullptr;
    s.sum_row_stride = a.sum.stride(0);
    s.bias_row_stride = a.down_bias ? a.down_bias.stride(0) : 0;
    s.count = static_cast<int32_t>(slots);
    s.top_k = static_cast<int32_t>(slots / tokens);
    s.first_expert = static_cast<int32_t>(a.first_expert);
  }

  // 3 launch
#if FI_CUDA
  p.gemm[0] = product(a.activated, a.x, a.up, a.up_scale, width, row_order(a.shuffle_tile, gated));
  p.gemm[1] = product(a.out, a.activated, a.down, a.down_scale, hidden, row_order(a.shuffle_tile, false));
  p.gemm[0].source = a.rows.data<int32_t>();
  p.gemm[0].bias = a.bias ? a.bias.data() : nullptr;
  p.gemm[0].bias_row_stride = a.bias ? a.bias.stride(0) : 0;
  p.gemm[0].gated = gated;
  p.gemm[0].activated = 1;
  p.ready = a.ready;
  p.products = 2;
  for (const Tensor& t : {a.x, a.activated})
    FI_CHECK(t.row_alignment(16) == 16, ValueError, "%s must have rows that are 16-byte aligned; got stride %lld",
             t.name(), static_cast<long long>(t.stride(0)));
  FI_CHECK(a.out.row_alignment(4) == 4, ValueError, "out must have rows at multiples of 4 bytes; got stride %lld",
           static_cast<long long>(a.out.stride(0)));
  for (const Tensor& t : {a.up, a.down})
    FI_CHECK(t.alignment(16, {t.stride(0), t.stride(-2)}) == 16, ValueError,
             "%s must have rows that are 16-byte aligned; got strides %lld, %lld", t.name(),
             static_cast<long long>(t.stride(0)), static_cast<long long>(t.stride(1)));
  for (const OptionalTensor& scale : {a.up_scale, a.down_scale})
    FI_CHECK(!scale || scale.alignment(8, {}) == 8, ValueError, "%s must be aligned to 8 bytes", scale.name());
  const Entry& entry = tile(kernel, slots, a.up.dtype() == kE4M3);
  const auto config = MoeExpertsConfig::of(entry);
  for (const OptionalTensor& rows : {a.sum, a.down_bias})
    FI_CHECK(!rows || rows.row_alignment(4) == 4, ValueError,
             "%s must have rows at multiples of 4 bytes; got stride %lld", rows.name(),
             static_cast<long long>(rows.stride(0)));
  FI_CHECK(!a.sum || config.tokens <= kMostSortedTokens, ValueError,
           "expected_tokens must be at most %d with sum; got %lld", kMostSortedTokens,
           static_cast<long long>(a.expected_tokens));
  FI_CHECK(experts + slots / config.tokens <= kMaxExpertPasses, ValueError,
           "rows must be at most %lld for %lld experts and tiles of %lld tokens; got %lld",
           static_cast<long long>((kMaxExpertPasses - experts) * config.tokens), static_cast<long long>(experts),
           static_cast<long long>(config.tokens), static_cast<long long>(slots));
  const double hit = static_cast<double>(std::min<int64_t>(experts, slots));
  p.weights_once =
      hit * static_cast<double>(hidden * (columns + width) * a.up.dtype().bytes() / packed) < kEvictFirstBytes;
  describe(kernel, p.gemm[0], a.up, config.weight_rows);
  describe(kernel, p.gemm[1], a.down, config.weight_rows);
  Launch launch{kernel.multiprocessors(a.x.device())};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.x.device(), p);
#else
  (void)a.enable_pdl;
  cpu::run_experts(p, a, gated);
  if (a.sum) cpu::sum_slots(p, a);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_experts, fi::request_of)
