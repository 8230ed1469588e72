// moe_activation: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/fused_moe/moe_activation.h"

#include <algorithm>

#include "fi/generated/moe_activation.h"
#include "fi/host/contents.h"

#if !FI_CUDA
#include "fi/find_segment.h"
#include "fi/fused_moe/moe_activation_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const MoeActivationParams& p, const MoeActivationArgs& a, bool gated) {
  const int64_t columns = p.width * (gated ? 2 : 1), rows = std::min<int64_t>(a.x.size(0), p.offsets[p.experts]);
  const cpu::LoadRow load = cpu::row_loader(a.x.dtype()), load_bias = cpu::row_loader(a.bias ? a.bias.dtype() : kF32);
  const cpu::StoreRow store = cpu::row_storer(a.out.dtype());
  const cpu::ActivateRow activate = cpu::row_activation(a.activation);
  cpu::for_rows(rows, 4 * columns, 3 * columns, [&](int64_t row, float* x) {
    float *stored = x + columns, *bias = stored + columns;
    const int32_t e = find_segment(p.offsets, p.experts, row);
    load(a.x.at(row * p.x_row_stride), stored, columns);
    if (p.bias) {
      load_bias(a.bias.at(e * p.bias_row_stride), bias, columns);
      for (int64_t i = 0; i < columns; ++i) stored[i] += bias[i];
    }
    for (int64_t i = 0; i < columns; ++i) x[i] = stored[p.columns ? p.columns[i] : i];
    if (p.delta) {
      load(a.delta.at(row * p.delta_row_stride), bias, columns);
      for (int64_t i = 0; i < columns; ++i) x[i] += bias[gated ? (i + p.width) % columns : i];
    }
    const ExpertConstants c{p.alpha ? p.alpha[e] : p.constants.alpha, p.beta ? p.beta[e] : p.constants.beta,
                            p.limit ? p.limit[e] : p.constants.limit};
    activate(x, x + (gated ? p.width : 0), c, p.width);
    if (p.quant)
      for (int64_t i = 0; i < p.width; ++i) x[i] *= p.quant[e * p.quant_stride];
    if (p.out_scale)
      cpu::quantize_blocks(x, a.out.at(row * p.out_row_stride), p.out_scale + row * (p.width / 128), p.width);
    else
      store(x, a.out.at(row * p.out_row_stride), p.width);
  });
}
#else
const Entry& tile(const Kernel& kernel, const MoeActivationArgs& a, int64_t width) {
  const bool vectors = !a.columns && width % 16 == 0 && a.x.row_alignment(16) == 16 && a.out.row_alignment(16) == 16 &&
                       (!a.bias || a.bias.row_alignment(16) == 16) && (!a.delta || a.delta.row_alignment(16) == 16);
  return kernel.first_entry([&](const Entry& e) { return vectors || !MoeActivationConfig::of(e).vectors; });
}
#endif

MoeActivationRequest request_of(const MoeActivationArgs& a) {
  return {a.x.dtype(), a.out.dtype(), static_cast<MoeActivationRequest::Activation>(a.activation)};
}

void moe_activation(const Kernel& kernel, const MoeActivationArgs& a) {
  // 1 check
  const bool gated = is_gated(static_cast<ExpertActivation>(a.activation));
  Dim rows{"rows"}, width{"width"}, ends{"experts + 1"};
  a.x.is({kF16, kBF16, kF32}).inner_contiguous();
  a.out.is({kF16, kBF16, kE4M3}).on(a.x).inner_contiguous().shape(rows, width);
  Dim columns{gated ? "2 * width" : "width", width * (gated ? 2 : 1)};
  a.x.shape(rows, columns);
  a.offsets.is({kI32}).on(a.x).contiguous().shape(ends);
  FI_CHECK(ends >= 2, ValueError, "offsets must be for one expert or more; got %s", a.offsets.shape_str().c_str());
  Dim experts{"experts", ends - 1};
  if (a.bias) {
    if (a.bias.dtype() != kF32) a.bias.like(a.x);
    a.bias.on(a.x).inner_contiguous().shape(experts, columns);
  }
  if (a.delta) a.delta.like(a.x).inner_contiguous().shape(rows, columns);
  for (const OptionalTensor& constant : {a.alpha, a.beta, a.limit})
    if (constant) constant.is({kF32}).on(a.x).contiguous().shape(experts);
  if (a.columns) a.columns.is({kI32}).on(a.x).contiguous().shape(columns);
  if (a.quant) {
    a.quant.is({kF32}).on(a.x).contiguous();
    FI_CHECK(a.quant.numel() == 1 || a.quant.numel() == experts, ValueError,
             "quant must have one element, or one for each of %lld experts; got %s", static_cast<long long>(experts),
             a.quant.shape_str().c_str());
  }
  if (a.out_scale) {
    Dim blocks{"width / 128", width / 128};
    FI_CHECK(width % 128 == 0 && a.out.dtype() == kE4M3, ValueError,
             "out must be float8_e4m3fn with a multiple of 128 columns for out_scale; got %s %s",
             a.out.dtype().str().c_str(), a.out.shape_str().c_str());
    a.out_scale.is({kF32}).on(a.x).contiguous().shape(rows, blocks);
  }
  FI_CHECK(rows < 1 << 24 && width < 1 << 24, ValueError, "out must have fewer than 2^24 rows and columns; got %s",
           a.out.shape_str().c_str());
  if (rows == 0 || width == 0) return;
  if (kernel.checks_contents(a.x.device())) check_offsets(Integers(kernel, a.offsets), rows);

  // 2 shape
  MoeActivationParams p{};
  const auto floats = [](const OptionalTensor& t) { return t ? t.data<float>() : nullptr; };
  p.out = a.out.data();
  p.out_scale = floats(a.out_scale);
  p.x = a.x.data();
  p.bias = a.bias ? a.bias.data() : nullptr;
  p.delta = a.delta ? a.delta.data() : nullptr;
  p.delta_row_stride = a.delta ? a.delta.stride(0) : 0;
  p.offsets = a.offsets.data<int32_t>();
  p.columns = a.columns ? a.columns.data<int32_t>() : nullptr;
  p.alpha = floats(a.alpha);
  p.beta = floats(a.beta);
  p.limit = floats(a.limit);
  p.quant = floats(a.quant);
  p.out_row_stride = a.out.stride(0);
  p.x_row_stride = a.x.stride(0);
  p.bias_row_stride = a.bias ? a.bias.stride(0) : 0;
  p.width = static_cast<int32_t>(width);
  p.experts = static_cast<int32_t>(experts);
  p.rows = static_cast<int32_t>(rows);
  p.quant_stride = a.quant && a.quant.numel() > 1;
  p.bias_is_float = a.bias && a.bias.dtype() == kF32;
  p.constants = {static_cast<float>(a.alpha_value), static_cast<float>(a.beta_value),
                 static_cast<float>(a.limit_value)};

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, a, width);
  const int64_t per_row = (width + 15) / 16;
  FI_CHECK(per_row * rows < int64_t{1} << 31, ValueError, "out is too large: got %s", a.out.shape_str().c_str());
  p.threads_per_row = divisor(static_cast<uint32_t>(per_row));
  // As many CTAs as run at once.
  Launch launch{
      std::min((per_row * rows + entry.threads - 1) / entry.threads, kernel.multiprocessors(a.x.device()) * 8)};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.x.device(), p);
#else
  (void)a.enable_pdl;
  run_cpu(p, a, gated);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_activation, fi::request_of)
