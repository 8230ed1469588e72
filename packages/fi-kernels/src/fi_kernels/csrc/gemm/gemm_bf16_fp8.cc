// gemm_bf16_fp8: checks the arguments and launches the kernel of bf16 tokens and e4m3 weights, or runs the CPU one.
#include <algorithm>

#include "fi/gemm/gemm_few_bits_launch.h"
#include "fi/generated/gemm_bf16_fp8.h"

#if !FI_CUDA
#include "fi/gemm/gemm_few_bits_cpu.h"
#endif

namespace fi {
namespace {

GemmBf16Fp8Request request_of(const GemmBf16Fp8Args& a) {
  constexpr int64_t kMostTokens = 16;  // of a tile; m counts up to it
  const int64_t alignment = std::min({a.a.alignment(16, {a.a.stride_or_0(0)}), a.b.alignment(16, {a.b.stride_or_0(0)}),
                                      a.b.alignment(16, {a.a.size_or_0(-1)})});
  return {a.out.dtype(), alignment, std::min(a.a.size_or_0(0), kMostTokens)};
}

void gemm_bf16_fp8(const Kernel& kernel, const GemmBf16Fp8Args& a) {
  // 1 check
  Dim m{"m"}, n{"n"}, k{"k"};
  a.a.is({kBF16}).shape(m, k).inner_contiguous();
  a.b.is({kE4M3}).on(a.a).shape(n, k).inner_contiguous();
  a.out.is({kF16, kBF16, kF32}).on(a.a).shape(m, n).inner_contiguous();
  FI_CHECK(k >= 1 && m <= kFewBitsLimit && n <= kFewBitsLimit && k <= kFewBitsLimit, ValueError,
           "k must be positive, and m, n, k at most 2^30; got a %s, b %s", a.a.shape_str().c_str(),
           a.b.shape_str().c_str());
  if (a.alpha)
    FI_CHECK(a.alpha.is({kF32}).on(a.a).numel() == 1, ValueError, "alpha must have one element; got %s",
             a.alpha.shape_str().c_str());
  if (a.bias) a.bias.like(a.out).shape(n).contiguous();
  if (m == 0 || n == 0) return;

  // 2 shape
  GemmFewBitsParams p{};
  p.out = a.out.data();
  p.a = a.a.data();
  p.b = static_cast<const uint8_t*>(a.b.data());
  p.alpha = a.alpha ? a.alpha.data<const float>() : nullptr;
  p.bias = a.bias ? a.bias.data() : nullptr;
  p.out_row_stride = a.out.stride(0);
  p.a_row_stride = a.a.stride(0);
  p.b_row_stride = a.b.stride(0);
  p.m = static_cast<int32_t>(m);
  p.n = static_cast<int32_t>(n);
  p.k = static_cast<int32_t>(k);

  // 3 launch
#if FI_CUDA
  const int64_t tokens = GemmBf16Fp8Config::of(kernel.entries.front()).tokens;
  launch_few_bits(kernel, p, {8, tokens, 0}, a.a.device(), a.out, kernel.pdl(a.enable_pdl));
#else
  (void)kernel, (void)a.enable_pdl;
  cpu::gemm_bf16_fp8(p, a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::gemm_bf16_fp8, fi::request_of)
