// layernorm and its fp8 form: one contract, one launch, and the CPU kernel.
#include "fi/norm/layernorm.h"

#include "fi/norm/contract.h"
#include "fi/norm/entry.h"

#if !FI_CUDA
#include <algorithm>
#include <cmath>
#include <vector>

#include "fi/cpu/parallel.h"
#include "fi/cpu/rows.h"
#include "fi/norm/row.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
// Sums differences from the first element: they keep their digits where the row lies far from zero.
FI_CLONES float mean_of(const float* x, float inverse_d, int32_t d) {
  const float first = x[0];
  return first + cpu::sum(d, [=](int64_t i) __attribute__((always_inline)) { return x[i] - first; }) * inverse_d;
}

FI_CLONES void normalize(float* x, const float* gamma, const float* beta, float mean, float r, float out_scale,
                         int32_t d) {
#pragma omp simd
  for (int32_t i = 0; i < d; ++i) x[i] = ((x[i] - mean) * r * gamma[i] + beta[i]) * out_scale;
}

void run_cpu(const LayernormParams& p, DType in, DType out) {
  const cpu::LoadRow load = cpu::row_loader(in);
  const cpu::StoreRow store = cpu::row_storer(out);
  const float out_scale = out.bits == 8 ? 1.f / *p.scale : 1.f;
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / p.d), [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(p.d));
    for (int64_t row = begin; row < end; ++row) {
      load(static_cast<const char*>(p.input) + row * p.input_row * in.bytes(), x.data(), p.d);
      const float mean = mean_of(x.data(), p.inverse_d, p.d);
      const float r = 1.f / std::sqrt(cpu::squares(x.data(), mean, p.d) * p.inverse_d + p.eps);
      normalize(x.data(), p.gamma, p.beta, mean, r, out_scale, p.d);
      store(x.data(), static_cast<char*>(p.out) + row * p.out_row * out.bytes(), p.d);
    }
  });
}
#endif

void layernorm(const Kernel& kernel, Tensor out, Tensor input, Tensor gemma, Tensor beta, OptionalTensor scale,
               double eps) {
  // 1 check
  Dim n{"n"}, d{"d"};
  input.is({kF16, kBF16, kF32}).inner_contiguous().shape(n, d);
  out.shape(n, d);
  const bool quantized = check_norm_output(out, input, scale);
  gemma.is({kF32}).on(input).inner_contiguous().shape(d);
  beta.is({kF32}).on(input).inner_contiguous().shape(d);
  check_norm_size(input, n, d);
  if (n == 0 || d == 0) return;

  // 2 shape
  LayernormParams p{};
  p.out = out.data();
  p.input = input.data();
  p.gamma = gemma.data<float>();
  p.beta = beta.data<float>();
  p.scale = quantized ? scale.data<float>() : nullptr;
  p.out_row = out.stride(0);
  p.input_row = input.stride(0);
  p.rows = static_cast<int32_t>(n);
  p.d = static_cast<int32_t>(d);
  p.eps = static_cast<float>(eps);
  p.inverse_d = 1.f / static_cast<float>(p.d);

  // 3 launch
#if FI_CUDA
  const int64_t bytes = input.dtype().bytes(), out_bytes = out.dtype().bytes();
  int64_t vector = input.alignment(16, {p.input_row}) / bytes;
  vector = std::min(vector, out.alignment(16 / bytes * out_bytes, {p.out_row}) / out_bytes);
  if (gemma.alignment(16, {}) < 16 || beta.alignment(16, {}) < 16) vector = 1;
  const Entry& entry = norm_entry(kernel, p.d, vector);
  kernel.launch(entry, norm_launch(entry, p.rows, p.d, kernel.pdl(-1)), input.device(), p);
#else
  (void)kernel;
  run_cpu(p, input.dtype(), out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::layernorm, "out", "input", "gemma", "beta", "scale", "eps")
