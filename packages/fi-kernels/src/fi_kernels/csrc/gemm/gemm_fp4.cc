// gemm_fp4: checks the arguments and launches the kernel of bf16 tokens and fp4 weights, or runs the CPU one.
#include <algorithm>

#include "fi/gemm/gemm_few_bits_launch.h"
#include "fi/generated/gemm_fp4.h"

#if !FI_CUDA
#include "fi/gemm/gemm_few_bits_cpu.h"
#endif

namespace fi {
namespace {

GemmFp4Request request_of(const GemmFp4Args& a) {
  constexpr int64_t kMostTokens = 16;  // of a tile; m counts up to it
  const int64_t alignment = std::min({a.a.alignment(16, {a.a.stride_or_0(0)}), a.b.alignment(16, {a.b.stride_or_0(0)}),
                                      a.b.alignment(16, {a.a.size_or_0(-1) / 2})});
  return {a.out.dtype(), a.block_size, alignment, std::min(a.a.size_or_0(0), kMostTokens)};
}

void gemm_fp4(const Kernel& kernel, const GemmFp4Args& a) {
  // 1 check
  Dim m{"m"}, n{"n"}, k{"k"}, half{"k / 2"};
  a.a.is({kBF16}).shape(m, k).inner_contiguous();
  half.value = k / 2;
  a.b.is({kU8}).on(a.a).shape(n, half).inner_contiguous();
  a.out.is({kF16, kBF16, kF32}).on(a.a).shape(m, n).inner_contiguous();
  const int64_t group = a.block_size;
  FI_CHECK(group == 16 || group == 32, ValueError, "block_size must be 16 (e4m3 scales) or 32 (ue8m0 scales); got %lld",
           static_cast<long long>(group));
  FI_CHECK(
      k >= 1 && k % group == 0 && m <= kFewBitsLimit && n <= kFewBitsLimit && k <= kFewBitsLimit, ValueError,
      "a must have shape [m, k] with a positive k that is a multiple of block_size %lld, and m, n, k at most 2^30; "
      "got a %s, b %s",
      static_cast<long long>(group), a.a.shape_str().c_str(), a.b.shape_str().c_str());
  const int64_t scale_tiles = few_bits_ceil(k / group, 4), scale_bytes = few_bits_ceil(n, 128) * scale_tiles * 512;
  a.b_scale.is({kU8, kE4M3}).on(a.a).contiguous();
  FI_CHECK(a.b_scale.numel() == scale_bytes, ValueError,
           "b_scale must have %lld elements in the 128x4 layout (%lld rows and %lld columns of scales, padded to 128 "
           "and 4); got %s",
           static_cast<long long>(scale_bytes), static_cast<long long>(n), static_cast<long long>(k / group),
           a.b_scale.shape_str().c_str());
  if (a.alpha)
    FI_CHECK(a.alpha.is({kF32}).on(a.a).numel() == 1, ValueError, "alpha must have one element; got %s",
             a.alpha.shape_str().c_str());
  if (m == 0 || n == 0) return;

  // 2 shape
  GemmFewBitsParams p{};
  p.out = a.out.data();
  p.a = a.a.data();
  p.b = a.b.data<const uint8_t>();
  p.scales = a.b_scale.data<const uint8_t>();
  p.alpha = a.alpha ? a.alpha.data<const float>() : nullptr;
  p.out_row_stride = a.out.stride(0);
  p.a_row_stride = a.a.stride(0);
  p.b_row_stride = a.b.stride(0);
  p.m = static_cast<int32_t>(m);
  p.n = static_cast<int32_t>(n);
  p.k = static_cast<int32_t>(k);
  p.scale_tiles = static_cast<int32_t>(scale_tiles);

  // 3 launch
#if FI_CUDA
  FI_CHECK(a.b_scale.alignment(16, {}) == 16, ValueError,
           "b_scale must be 16-byte aligned; got address %p: call .clone() on it", a.b_scale.data());
  const int64_t tokens = GemmFp4Config::of(kernel.entries.front()).tokens;
  launch_few_bits(kernel, p, {4, tokens, group}, a.a.device(), a.out, kernel.pdl(a.enable_pdl));
#else
  (void)kernel, (void)a.enable_pdl;
  cpu::gemm_fp4(p, static_cast<int32_t>(group), a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::gemm_fp4, fi::request_of)
