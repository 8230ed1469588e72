// Pairs of fp8 to pairs of half (PTX ISA 9.7.9.21, cvt): one instruction from sm_89 on, a few integer ones before; and
// floats to fp8.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// The lower two bytes of `pair`.
FI_DEVICE unsigned halves(unsigned pair, __nv_fp8_e4m3) {
  unsigned y;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(static_cast<unsigned short>(pair)));
#else
  // Exponent and mantissa move into the place of a half's, whose bias is 8 more. NaN becomes 480.
  const unsigned spread = __byte_perm(pair, 0, 0x1404);
  const unsigned bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(bits), "r"(0x5c005c00u));  // 2^8
#endif
  return y;
}
FI_DEVICE unsigned halves(unsigned pair, __nv_fp8_e5m2) { return __byte_perm(pair, 0, 0x1404); }

// The lower two bytes of `pair` as pairs of half or of bf16. sm_89 and later.
template <class KV>
FI_DEVICE unsigned dequantize_pair(unsigned pair, KV, __half) {
  return halves(pair, KV());
}
template <class KV>
FI_DEVICE unsigned dequantize_pair(unsigned pair, KV, __nv_bfloat16) {
  const unsigned x = halves(pair, KV());
  const float2 y = __half22float2(reinterpret_cast<const __half2&>(x));
  const __nv_bfloat162 z = __floats2bfloat162_rn(y.x, y.y);
  return reinterpret_cast<const unsigned&>(z);
}

// Four floats, the first in the lowest byte; beyond 448 they become 448, NaN stays NaN. sm_89 and later.
FI_DEVICE unsigned e4m3_quad(float x0, float x1, float x2, float x3) {
  unsigned y;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}

// Two halves to the lower two bytes; beyond 448 they become 448, NaN stays NaN. sm_89 and later.
FI_DEVICE unsigned e4m3_pair(unsigned halves) {
  unsigned short y;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(y) : "r"(halves));
  return y;
}

// Four floats in e5m2; beyond 57344 they become 57344.
FI_DEVICE unsigned e5m2_quad(float x0, float x1, float x2, float x3) {
  unsigned y;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\ncvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}

// The upper two bytes of `quad`, without a shift.
FI_DEVICE unsigned upper_halves(unsigned quad, __nv_fp8_e4m3) {
#if __CUDA_ARCH__ >= 890
  unsigned y;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, high;\n"
      "}"
      : "=r"(y)
      : "r"(quad));
  return y;
#else
  return halves(quad >> 16, __nv_fp8_e4m3{});
#endif
}
FI_DEVICE unsigned upper_halves(unsigned quad, __nv_fp8_e5m2) { return __byte_perm(quad, 0, 0x3424); }

}  // namespace fi
