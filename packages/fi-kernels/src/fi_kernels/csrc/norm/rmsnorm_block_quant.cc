// Residual-add rmsnorm with a 16-bit and a block-quantized e4m3 output: checks, the CUDA launch, and the CPU kernel.
#include "fi/norm/rmsnorm_block_quant.h"

#include "fi/generated/rmsnorm_block_quant.h"
#include "fi/norm/norm_launch.h"

#if !FI_CUDA
#include <cmath>
#include <vector>

#include "fi/cpu/math.h"
#include "fi/cpu/row_convert.h"
#include "fi/norm/norm_cpu.h"
#endif

namespace fi {
namespace {

// The kernels access 8 elements per vector and have no narrower entry, so every row must start at an aligned address.
void check_aligned(const Tensor& tensor, int64_t bytes) {
  const int64_t row = tensor.ndim() == 2 ? tensor.stride(0) : 0;
  FI_CHECK(tensor.alignment(bytes, {row}) == bytes, ValueError,
           "%s must have rows that start at multiples of %lld bytes; got address %p, row stride %lld elements: copy it",
           tensor.name(), static_cast<long long>(bytes), tensor.data(), static_cast<long long>(row));
}

#if !FI_CUDA
// Scales each block of y to the range of e4m3, and writes its scale to scales[block * pitch].
FI_CLONES void quantize(float* y, float* scales, int64_t pitch, int32_t d) {
  for (int32_t block = 0; block < d / kQuantBlock; ++block, y += kQuantBlock) {
    const float largest = cpu::maximum(
        kQuantBlock, [=](int64_t i) __attribute__((always_inline)) { return cpu::detail::magnitude(y[i]); });
    const float maximum = std::max(largest, kMinBlockMax);
    scales[block * pitch] = maximum / kE4m3Max;
    const float inv_scale = kE4m3Max / maximum;
#pragma omp simd
    for (int32_t i = 0; i < kQuantBlock; ++i) y[i] *= inv_scale;
  }
}

void run_cpu(const RmsnormBlockQuantParams& params, DType dtype) {
  const RmsnormParams& p = params.norm;
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype), store_quantized = cpu::row_storer(kE4M3);
  std::vector<float> weight(static_cast<size_t>(p.d));
  load(p.weight, weight.data(), p.d);
  cpu::for_rows(p.rows, p.d, 2 * int64_t{p.d}, [&](int64_t row, float* s) {
    char* residual = static_cast<char*>(p.residual) + row * p.residual_row_stride * dtype.bytes();
    char* normed = static_cast<char*>(p.out) + row * p.out_row_stride * dtype.bytes();
    load(static_cast<const char*>(p.input) + row * p.input_row_stride * dtype.bytes(), s, p.d);
    load(residual, s + p.d, p.d);
    cpu::add_residual(s, s + p.d, p.d);
    store(s, residual, p.d);
    const float inv_rms = 1.f / std::sqrt(cpu::sum_of_squares(s, 0.f, p.d) * p.inv_d + p.eps);
    cpu::scale_by_weight(s, weight.data(), inv_rms, p.d);
    store(s, normed, p.d);
    load(normed, s, p.d);
    quantize(s, params.block_scale + row, params.scale_pitch, p.d);
    store_quantized(s, static_cast<char*>(params.out) + row * params.out_row_stride, p.d);
  });
}
#endif

RmsnormBlockQuantRequest request_of(const RmsnormBlockQuantArgs& a) { return {a.input.dtype()}; }

void rmsnorm_block_quant(const Kernel& kernel, const RmsnormBlockQuantArgs& a) {
  // 1 check
  Dim n{"n"}, d{"d"};
  a.input.is({kF16, kBF16}).inner_contiguous().shape(n, d);
  FI_CHECK(d % kQuantBlock == 0 && d <= 1 << 30 && n <= 0x7fffffff, ValueError,
           "input must have shape [n, d] with n < 2^31 and d a multiple of 128 <= 2^30; got %s",
           a.input.shape_str().c_str());
  a.residual.like(a.input).inner_contiguous().shape(n, d);
  a.weight.like(a.input).inner_contiguous().shape(d);
  a.normed_out.like(a.input).inner_contiguous().shape(n, d);
  a.out.is({kE4M3}).on(a.input).inner_contiguous().shape(n, d);
  Dim blocks{"d / 128", d / kQuantBlock}, pitch{"n rounded up to a multiple of 4", (n + 3) / 4 * 4};
  a.block_scale.is({kF32}).on(a.input).shape(blocks, pitch).contiguous();
  if (n == 0 || d == 0) return;
  for (const Tensor& tensor : {a.input, a.residual, a.weight, a.normed_out}) check_aligned(tensor, 16);
  check_aligned(a.out, 8);

  // 2 shape
  RmsnormBlockQuantParams p{};
  p.norm.out = a.normed_out.data();
  p.norm.input = a.input.data();
  p.norm.residual = a.residual.data();
  p.norm.weight = a.weight.data();
  p.norm.out_row_stride = a.normed_out.stride(0);
  p.norm.input_row_stride = a.input.stride(0);
  p.norm.residual_row_stride = a.residual.stride(0);
  p.norm.rows = static_cast<int32_t>(n);
  p.norm.d = static_cast<int32_t>(d);
  p.norm.heads = divisor(1);
  FI_CHECK(a.eps >= 0, ValueError, "eps must be 0 or more; got %g", a.eps);
  p.norm.eps = static_cast<float>(a.eps);
  p.norm.inv_d = 1.f / static_cast<float>(p.norm.d);
  p.out = a.out.data();
  p.block_scale = a.block_scale.data<float>();
  p.out_row_stride = a.out.stride(0);
  p.scale_pitch = pitch;

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile<RmsnormBlockQuantConfig>(kernel, p.norm.d, 8);
  kernel.launch(entry, norm_launch<RmsnormBlockQuantConfig>(entry, p.norm.rows, p.norm.d, kernel.pdl(a.enable_pdl)),
                a.input.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p, a.input.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rmsnorm_block_quant, fi::request_of)
