// Pairs of fp8 to pairs of half (PTX ISA 9.7.9.21, cvt): one instruction from sm_89 on, a few integer ones before.
#pragma once
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
