// e4m3 values of the latent cache as 16-bit operands of tensor cores.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// Which two bytes of a word become a pair: neighbours of the lower or upper half, or those of even or odd columns.
constexpr unsigned kMlaLower = 0x9180, kMlaUpper = 0xB3A2, kMlaEven = 0xA280, kMlaOdd = 0xB391;

// Each of the two bytes with its sign in the upper half: selectors of prmt with the highest bit repeat a sign.
FI_DEVICE unsigned mla_spread(unsigned word, unsigned selector) {
  unsigned y;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(y) : "r"(word), "r"(selector));
  return y;
}

// Two e4m3 as numbers of another exponent bias: x 2^-kMlaShift, exactly, in three instructions. Subnormal ones become
// subnormal, which tensor cores take. NaN becomes 480 times the sign.
template <class T>
constexpr int kMlaShift = 0;
template <>
constexpr int kMlaShift<__nv_bfloat16> = 120;
FI_DEVICE unsigned mla_shifted(unsigned word, unsigned selector, __nv_bfloat16) {
  return (mla_spread(word, selector) << 4) & 0x87f087f0u;
}
FI_DEVICE unsigned mla_shifted(unsigned word, unsigned selector, __half) {
  const unsigned bits = (mla_spread(word, selector) << 7) & 0xbf80bf80u;
  unsigned y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(bits), "r"(0x5c005c00u));  // 2^8
  return y;
}

// A shifted pair as it was.
FI_DEVICE unsigned mla_unshifted(unsigned pair) {
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(0x7b807b80u), "r"(0x80008000u));  // 2^120, -0
  return y;
}

// Two e4m3 as they are.
FI_DEVICE unsigned mla_dequantize(unsigned word, unsigned selector, __nv_bfloat16) {
  return mla_unshifted(mla_shifted(word, selector, __nv_bfloat16()));
}
FI_DEVICE unsigned mla_dequantize(unsigned word, unsigned selector, __half) {
  return mla_shifted(word, selector, __half());
}

// The value of a ue8m0 code; 255 is NaN.
FI_DEVICE float mla_power_of_two(unsigned code) {
  return __uint_as_float(code == 255 ? 0x7fc00000u : code ? code << 23 : 0x00400000u);
}
// Two e4m3 times a power of two, of any size: as numbers of fp32, which become bf16.
FI_DEVICE unsigned mla_scaled(unsigned word, unsigned selector, float scale, __nv_bfloat16) {
  const unsigned pair = mla_dequantize(word, selector, __nv_bfloat16());
  const __nv_bfloat162 x =
      __floats2bfloat162_rn(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
  return reinterpret_cast<const unsigned&>(x);
}

// What is known of a scale: it is 1; with 2^kMlaShift it is finite; nothing.
enum class MlaScale { kNone, kSmall, kAny };
FI_DEVICE bool mla_is_large(float scale) { return !(fabsf(scale) < 128.f); }

// A factor of e4m3 values that makes products of shifted pairs, as the sum of two bf16, each in both halves of a word:
// products are rounded once.
template <MlaScale kScale>
struct MlaFactor {
  unsigned high, low;

  FI_DEVICE MlaFactor(float x) {
    if (kScale == MlaScale::kSmall) x *= 0x1p120f;
    const __nv_bfloat162 highs = __float2bfloat162_rn(x);
    const __nv_bfloat162 lows = __float2bfloat162_rn(x - __low2float(highs));
    high = reinterpret_cast<const unsigned&>(highs), low = reinterpret_cast<const unsigned&>(lows);
  }
  FI_DEVICE unsigned times(unsigned pair) const {
    unsigned y;
    if (kScale != MlaScale::kSmall) pair = mla_unshifted(pair);
    if (kScale == MlaScale::kNone) return pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(low), "r"(0x80008000u));
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(y) : "r"(pair), "r"(high));
    return y;
  }
};

}  // namespace fi
