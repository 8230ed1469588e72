// layernorm and its fp8 form: checks the arguments, fills the parameters, launches the CUDA kernel or runs the CPU one.
#include "fi/norm/layernorm.h"

#include "fi/generated/layernorm.h"
#include "fi/norm/norm_contract.h"
#include "fi/norm/norm_launch.h"

#if !FI_CUDA
#include <cmath>

#include "fi/cpu/row_convert.h"
#include "fi/norm/norm_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
// The mean, summed as differences from the first element: they lose no digits where the row lies far from zero.
FI_CLONES float shifted_mean(const float* x, float inv_d, int32_t d) {
  const float shift = x[0];
  return shift + cpu::sum(d, [=](int64_t i) __attribute__((always_inline)) { return x[i] - shift; }) * inv_d;
}

FI_CLONES void normalize(float* x, const float* gamma, const float* beta, float mean, float inv_std, float out_factor,
                         int32_t d) {
#pragma omp simd
  for (int32_t i = 0; i < d; ++i) x[i] = ((x[i] - mean) * inv_std * gamma[i] + beta[i]) * out_factor;
}

void run_cpu(const LayernormParams& p, DType in, DType out) {
  const cpu::LoadRow load = cpu::row_loader(in);
  const cpu::StoreRow store = cpu::row_storer(out);
  const float out_factor = out.bits == 8 ? 1.f / *p.scale : 1.f;
  cpu::for_rows(p.rows, p.d, p.d, [&](int64_t row, float* x) {
    load(static_cast<const char*>(p.input) + row * p.input_row_stride * in.bytes(), x, p.d);
    const float mean = shifted_mean(x, p.inv_d, p.d);
    const float inv_std = 1.f / std::sqrt(cpu::sum_of_squares(x, mean, p.d) * p.inv_d + p.eps);
    normalize(x, p.gamma, p.beta, mean, inv_std, out_factor, p.d);
    store(x, static_cast<char*>(p.out) + row * p.out_row_stride * out.bytes(), p.d);
  });
}
#endif

LayernormRequest request_of(const LayernormArgs& a) { return {a.input.dtype(), a.out.dtype()}; }

void layernorm(const Kernel& kernel, const LayernormArgs& a) {
  // 1 check
  Dim n{"n"}, d{"d"};
  a.input.is({kF16, kBF16, kF32}).inner_contiguous().shape(n, d);
  a.out.shape(n, d);
  const bool quantized = check_norm_output(a.out, a.input, a.scale);
  a.gemma.is({kF32}).on(a.input).inner_contiguous().shape(d);
  a.beta.is({kF32}).on(a.input).inner_contiguous().shape(d);
  check_norm_size(a.input, n, d);
  if (n == 0 || d == 0) return;

  // 2 shape
  LayernormParams p{};
  p.out = a.out.data();
  p.input = a.input.data();
  p.gamma = a.gemma.data<float>();
  p.beta = a.beta.data<float>();
  p.scale = quantized ? a.scale.data<float>() : nullptr;
  p.out_row_stride = a.out.stride(0);
  p.input_row_stride = a.input.stride(0);
  p.rows = static_cast<int32_t>(n);
  p.d = static_cast<int32_t>(d);
  FI_CHECK(a.eps >= 0, ValueError, "eps must be 0 or more; got %g", a.eps);
  p.eps = static_cast<float>(a.eps);
  p.inv_d = 1.f / static_cast<float>(p.d);

  // 3 launch
#if FI_CUDA
  int64_t vec = vec_size(p.d, {a.input, a.out});
  if (a.gemma.alignment(16, {}) < 16 || a.beta.alignment(16, {}) < 16) vec = 1;
  const Entry& entry = tile<LayernormConfig>(kernel, p.d, vec);
  kernel.launch(entry, norm_launch<LayernormConfig>(entry, p.rows, p.d, kernel.pdl(-1)), a.input.device(), p);
#else
  (void)kernel;
  run_cpu(p, a.input.dtype(), a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::layernorm, fi::request_of)
