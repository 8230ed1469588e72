// rmsnorm and its residual-add, gemma and fp8 forms: checks the arguments, launches the CUDA kernel or runs the CPU
// one.
#include "fi/norm/rmsnorm.h"

#include "fi/generated/rmsnorm.h"
#include "fi/norm/norm_contract.h"
#include "fi/norm/norm_launch.h"

#if !FI_CUDA
#include <cmath>
#include <vector>

#include "fi/cpu/row_convert.h"
#include "fi/norm/norm_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const RmsnormParams& p, DType in, DType out) {
  const cpu::LoadRow load = cpu::row_loader(in);
  const cpu::StoreRow store_in = cpu::row_storer(in), store_out = cpu::row_storer(out);
  const float out_factor = out.bits == 8 ? 1.f / *p.scale : 1.f;
  std::vector<float> weight(static_cast<size_t>(p.d));
  load(p.weight, weight.data(), p.d);
  for (float& w : weight) w += p.weight_bias;
  cpu::for_rows(p.rows, p.d, 2 * int64_t{p.d}, [&](int64_t index, float* s) {
    const int64_t row = index / p.heads.value, head = index % p.heads.value;
    load(static_cast<const char*>(p.input) + (row * p.input_row_stride + head * p.input_head_stride) * in.bytes(), s,
         p.d);
    if (p.residual) {
      char* residual = static_cast<char*>(p.residual) + row * p.residual_row_stride * in.bytes();
      load(residual, s + p.d, p.d);
      cpu::add_residual(s, s + p.d, p.d);
      store_in(s, residual, p.d);
    }
    const float inv_rms = 1.f / std::sqrt(cpu::sum_of_squares(s, 0.f, p.d) * p.inv_d + p.eps);
    cpu::scale_by_weight(s, weight.data(), inv_rms * out_factor, p.d);
    store_out(s, static_cast<char*>(p.out) + (row * p.out_row_stride + head * p.out_head_stride) * out.bytes(), p.d);
  });
}
#endif

RmsnormRequest request_of(const RmsnormArgs& a) {
  return {a.input.dtype(), a.out.dtype(), static_cast<bool>(a.residual)};
}

void rmsnorm(const Kernel& kernel, const RmsnormArgs& a) {
  // 1 check
  Dim n{"n"}, heads{"heads", 1}, d{"d"};
  FI_CHECK(a.input.ndim() == 2 || a.input.ndim() == 3, ValueError,
           "input must have shape [n, d] or [n, heads, d]; got %s", a.input.shape_str().c_str());
  a.input.is({kF16, kBF16, kF32}).inner_contiguous();
  if (a.input.ndim() == 2) {
    a.input.shape(n, d);
    a.out.shape(n, d);
  } else {
    heads.value = -1;
    a.input.shape(n, heads, d);
    a.out.shape(n, heads, d);
  }
  const bool quantized = check_norm_output(a.out, a.input, a.scale);
  a.weight.like(a.input).inner_contiguous().shape(d);
  if (a.residual) {
    FI_CHECK(a.input.ndim() == 2, ValueError, "input must have shape [n, d] when a residual is added; got %s",
             a.input.shape_str().c_str());
    a.residual.like(a.input).inner_contiguous().shape(n, d);
  }
  check_norm_size(a.input, n * heads, d);
  if (n == 0 || heads == 0 || d == 0) return;

  // 2 shape
  const bool has_heads = a.input.ndim() == 3;
  RmsnormParams p{};
  p.out = a.out.data();
  p.input = a.input.data();
  p.residual = a.residual ? a.residual.data() : nullptr;
  p.weight = a.weight.data();
  p.scale = quantized ? a.scale.data<float>() : nullptr;
  p.out_row_stride = a.out.stride(0);
  p.out_head_stride = has_heads ? a.out.stride(1) : 0;
  p.input_row_stride = a.input.stride(0);
  p.input_head_stride = has_heads ? a.input.stride(1) : 0;
  p.residual_row_stride = a.residual ? a.residual.stride(0) : 0;
  p.rows = static_cast<int32_t>(n * heads);
  p.d = static_cast<int32_t>(d);
  p.heads = divisor(static_cast<uint32_t>(heads));
  FI_CHECK(a.eps >= 0, ValueError, "eps must be 0 or more; got %g", a.eps);
  p.eps = static_cast<float>(a.eps);
  p.weight_bias = static_cast<float>(a.weight_bias);
  p.inv_d = 1.f / static_cast<float>(p.d);

  // 3 launch
#if FI_CUDA
  const int64_t vec = vec_size(p.d, {a.input, a.weight, a.out, a.residual ? Tensor(a.residual) : a.input});
  const Entry& entry = tile<RmsnormConfig>(kernel, p.d, vec);
  kernel.launch(entry, norm_launch<RmsnormConfig>(entry, p.rows, p.d, kernel.pdl(a.enable_pdl)), a.input.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p, a.input.dtype(), a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rmsnorm, fi::request_of)
