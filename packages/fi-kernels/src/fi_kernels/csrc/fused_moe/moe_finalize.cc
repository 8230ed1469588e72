// moe_finalize: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/fused_moe/moe_finalize.h"

#include "fi/generated/moe_finalize.h"
#include "fi/host/steps.h"

#if !FI_CUDA
#include "fi/find_segment.h"
#include "fi/fused_moe/moe_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const MoeFinalizeParams& p, const MoeFinalizeArgs& a) {
  const int64_t width = p.width;
  if (a.positions) cpu::check_positions(a.positions, a.y.size(0));
  const cpu::LoadRow load = cpu::row_loader(a.y.dtype()), load_bias = cpu::row_loader(a.bias ? a.bias.dtype() : kF32),
                     load_weight = cpu::row_loader(a.weights ? a.weights.dtype() : kF32);
  const cpu::StoreRow store = cpu::row_storer(a.out.dtype());
  cpu::for_rows(a.out.size(0), 2 * width * p.top_k, 4 * width, [&](int64_t token, float* sum) {
    float *x = sum + width, *bias = x + width, *ordered = bias + width;
    std::fill(sum, sum + width, 0.f);
    for (int64_t j = 0; j < p.top_k; ++j) {
      const int64_t row = p.positions ? p.positions[token * p.top_k + j] : j * p.tokens + token;
      if (row < 0 || (p.offsets && row >= p.offsets[p.experts])) continue;
      float weight = 1.f;
      if (p.weights) load_weight(a.weights.at(token * p.weights_token_stride + j * p.weights_slot_stride), &weight, 1);
      load(a.y.at(row * p.y_row_stride), x, width);
      if (p.bias) {
        load_bias(a.bias.at(find_segment(p.offsets, p.experts, row) * p.bias_row_stride), bias, width);
        for (int64_t i = 0; i < width; ++i) x[i] += bias[i];
      }
      for (int64_t i = 0; i < width; ++i) sum[i] += weight * x[i];
    }
    for (int64_t i = 0; p.columns && i < width; ++i) ordered[i] = sum[p.columns[i]];
    float* total = p.columns ? ordered : sum;
    if (p.added) {
      load(a.added.at(token * p.added_row_stride), x, width);
      for (int64_t i = 0; i < width; ++i) total[i] += x[i];
    }
    store(total, a.out.at(token * p.out_row_stride), width);
  });
}
#else
const Entry& tile(const Kernel& kernel, const MoeFinalizeArgs& a, int64_t width) {
  return kernel.first_entry([&](const Entry& e) {
    const int64_t vec = MoeFinalizeConfig::of(e).vec_size;
    const auto fits = [&](const Tensor& t) {
      const int64_t bytes = std::min<int64_t>(16, vec * t.dtype().bytes());
      return t.row_alignment(bytes) == bytes;
    };
    return vec == 1 || (!a.columns && width % vec == 0 && fits(a.y) && fits(a.out) && (!a.bias || fits(a.bias)) &&
                        (!a.added || fits(a.added)));
  });
}
#endif

MoeFinalizeRequest request_of(const MoeFinalizeArgs& a) { return {a.y.dtype(), a.out.dtype()}; }

void moe_finalize(const Kernel& kernel, const MoeFinalizeArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, top_k{"top_k"}, rows{"rows"}, width{"width"}, ends{"experts + 1"};
  FI_CHECK(a.positions || a.weights, TypeError, "positions or weights must be a tensor; got None");
  if (a.positions) a.positions.is({kI32}).contiguous().shape(tokens, top_k);
  a.y.is({kF16, kBF16, kF32}).inner_contiguous().shape(rows, width);
  if (a.positions) a.positions.on(a.y);
  a.out.is({kF16, kBF16, kF32}).on(a.y).inner_contiguous().shape(tokens, width);
  if (a.weights) a.weights.is({kF32, kBF16, kF16}).on(a.y).shape(tokens, top_k);
  FI_CHECK(a.positions || rows == tokens * top_k, ValueError,
           "y must have a row for each weight where there are no positions, %lld; got %s",
           static_cast<long long>(tokens * top_k), a.y.shape_str().c_str());
  if (a.added) a.added.like(a.y).inner_contiguous().shape(tokens, width);
  if (a.offsets) {
    a.offsets.is({kI32}).on(a.y).contiguous().shape(ends);
    FI_CHECK(ends >= 1, ValueError, "offsets must not be empty; got %s", a.offsets.shape_str().c_str());
  }
  if (a.bias) {
    FI_CHECK(a.offsets, ValueError, "offsets must be given with bias; got None");
    Dim experts{"experts", ends - 1};
    if (a.bias.dtype() != kF32) a.bias.like(a.y);
    a.bias.on(a.y).inner_contiguous().shape(experts, width);
  }
  if (a.columns) a.columns.is({kI32}).on(a.y).contiguous().shape(width);
  FI_CHECK(tokens < 1 << 24 && width < 1 << 24, ValueError, "out must have fewer than 2^24 rows and columns; got %s",
           a.out.shape_str().c_str());
  if (tokens == 0 || width == 0) return;

  // 2 shape
  MoeFinalizeParams p{};
  p.out = a.out.data();
  p.y = a.y.data();
  p.positions = a.positions ? a.positions.data<int32_t>() : nullptr;
  p.weights = a.weights ? a.weights.data() : nullptr;
  p.offsets = a.offsets ? a.offsets.data<int32_t>() : nullptr;
  p.bias = a.bias ? a.bias.data() : nullptr;
  p.columns = a.columns ? a.columns.data<int32_t>() : nullptr;
  p.added = a.added ? a.added.data() : nullptr;
  p.added_row_stride = a.added ? a.added.stride(0) : 0;
  p.out_row_stride = a.out.stride(0);
  p.y_row_stride = a.y.stride(0);
  p.bias_row_stride = a.bias ? a.bias.stride(0) : 0;
  if (a.weights) p.weights_token_stride = a.weights.stride(0), p.weights_slot_stride = a.weights.stride(1);
  p.tokens = static_cast<int32_t>(tokens);
  p.width = static_cast<int32_t>(width);
  p.top_k = static_cast<int32_t>(top_k);
  p.experts = a.offsets ? static_cast<int32_t>(ends - 1) : 0;
  p.bias_is_float = a.bias && a.bias.dtype() == kF32;
  p.weight_type = !a.weights || a.weights.dtype() == kF32 ? kFloatWeights
                  : a.weights.dtype() == kBF16            ? kBfloat16Weights
                                                          : kHalfWeights;

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, a, width);
  const auto config = MoeFinalizeConfig::of(entry);
  const int64_t of_warp = config.vec_size * config.parts * 32, per_row = (width + of_warp - 1) / of_warp;
  const int64_t warps = entry.threads / 32;
  FI_CHECK(per_row * tokens < int64_t{1} << 31, ValueError, "out is too large: got %s", a.out.shape_str().c_str());
  p.warps_per_row = divisor(static_cast<uint32_t>(per_row));
  Launch launch{(per_row * tokens + warps - 1) / warps};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.y.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p, a);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_finalize, fi::request_of)
FI_STEPS
