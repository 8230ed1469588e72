// Residual-add rmsnorm with a 16-bit and a block-quantised e4m3 output: one contract, one launch, and the CPU kernel.
#include "fi/norm/rmsnorm_block_quant.h"

#include "fi/host/op.h"
#include "fi/norm/entry.h"

#if !FI_CUDA
#include <algorithm>
#include <cmath>
#include <vector>

#include "fi/cpu/math.h"
#include "fi/cpu/parallel.h"
#include "fi/cpu/rows.h"
#include "fi/norm/row.h"
#endif

namespace fi {
namespace {

// Kernels move 8 elements at once; a block of 128 is theirs to divide, so there is no narrower way.
void check_aligned(const Tensor& tensor, int64_t bytes) {
  const int64_t row = tensor.ndim() == 2 ? tensor.stride(0) : 0;
  FI_CHECK(tensor.alignment(bytes, {row}) == bytes, ValueError,
           "%s must have rows that start at multiples of %lld bytes; got address %p, row stride %lld elements: copy it",
           tensor.name(), static_cast<long long>(bytes), tensor.data(), static_cast<long long>(row));
}

#if !FI_CUDA
// Scales each block to the range of e4m3; returns through `scales`, a row of [d / 128, pitch].
FI_CLONES void quantize(float* y, float* scales, int64_t pitch, int32_t d) {
  for (int32_t block = 0; block < d / kQuantBlock; ++block, y += kQuantBlock) {
    const float largest = cpu::maximum(
        kQuantBlock, [=](int64_t i) __attribute__((always_inline)) { return cpu::detail::magnitude(y[i]); });
    const float maximum = std::max(largest, kSmallestMaximum);
    scales[block * pitch] = maximum / kQuantMax;
    const float factor = kQuantMax / maximum;
#pragma omp simd
    for (int32_t i = 0; i < kQuantBlock; ++i) y[i] *= factor;
  }
}

void run_cpu(const RmsnormBlockQuantParams& params, DType dtype) {
  const RmsnormParams& p = params.norm;
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype), store_quantized = cpu::row_storer(kE4M3);
  const auto d = static_cast<size_t>(p.d);
  std::vector<float> weight(d);
  load(p.weight, weight.data(), p.d);
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / p.d), [&](int64_t begin, int64_t end) {
    std::vector<float> s(d), other(d);
    for (int64_t row = begin; row < end; ++row) {
      char* residual = static_cast<char*>(p.residual) + row * p.residual_row * dtype.bytes();
      char* normed = static_cast<char*>(p.out) + row * p.out_row * dtype.bytes();
      load(static_cast<const char*>(p.input) + row * p.input_row * dtype.bytes(), s.data(), p.d);
      load(residual, other.data(), p.d);
      cpu::add_to(s.data(), other.data(), p.d);
      store(s.data(), residual, p.d);
      const float r = 1.f / std::sqrt(cpu::squares(s.data(), 0.f, p.d) * p.inverse_d + p.eps);
      cpu::multiply(s.data(), weight.data(), r, p.d);
      store(s.data(), normed, p.d);
      load(normed, s.data(), p.d);
      quantize(s.data(), params.block_scale + row, params.scale_pitch, p.d);
      store_quantized(s.data(), static_cast<char*>(params.out) + row * params.quant_row, p.d);
    }
  });
}
#endif

void rmsnorm_block_quant(const Kernel& kernel, Tensor out, Tensor block_scale, Tensor normed_out, Tensor input,
                         Tensor residual, Tensor weight, double eps, int64_t enable_pdl) {
  // 1 check
  Dim n{"n"}, d{"d"};
  input.is({kF16, kBF16}).inner_contiguous().shape(n, d);
  FI_CHECK(d % kQuantBlock == 0 && d <= 1 << 30 && n <= 0x7fffffff, ValueError,
           "input must have shape [n, d] with n < 2^31 and d a multiple of 128 <= 2^30; got %s",
           input.shape_str().c_str());
  residual.like(input).inner_contiguous().shape(n, d);
  weight.like(input).inner_contiguous().shape(d);
  normed_out.like(input).inner_contiguous().shape(n, d);
  out.is({kE4M3}).on(input).inner_contiguous().shape(n, d);
  Dim blocks{"d / 128", d / kQuantBlock}, pitch{"n rounded up to a multiple of 4", (n + 3) / 4 * 4};
  block_scale.is({kF32}).on(input).shape(blocks, pitch).contiguous();
  if (n == 0 || d == 0) return;
  for (const Tensor& tensor : {input, residual, weight, normed_out}) check_aligned(tensor, 16);
  check_aligned(out, 8);

  // 2 shape
  RmsnormBlockQuantParams p{};
  p.norm.out = normed_out.data();
  p.norm.input = input.data();
  p.norm.residual = residual.data();
  p.norm.weight = weight.data();
  p.norm.out_row = normed_out.stride(0);
  p.norm.input_row = input.stride(0);
  p.norm.residual_row = residual.stride(0);
  p.norm.rows = static_cast<int32_t>(n);
  p.norm.d = static_cast<int32_t>(d);
  p.norm.heads = divisor(1);
  p.norm.eps = static_cast<float>(eps);
  p.norm.inverse_d = 1.f / static_cast<float>(p.norm.d);
  p.out = out.data();
  p.block_scale = block_scale.data<float>();
  p.quant_row = out.stride(0);
  p.scale_pitch = pitch;

  // 3 launch
#if FI_CUDA
  const Entry& entry = norm_entry(kernel, p.norm.d, 8);
  kernel.launch(entry, norm_launch(entry, p.norm.rows, p.norm.d, kernel.pdl(enable_pdl)), input.device(), p);
#else
  (void)kernel, (void)enable_pdl;
  run_cpu(p, input.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rmsnorm_block_quant, "out", "block_scale", "normed_out", "input", "residual", "weight", "eps", "enable_pdl")
