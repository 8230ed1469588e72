// Elementary functions: approximate ones of the special function unit (PTX ISA 9.7.3), subnormals flushed to zero.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// 2^x within 2 ulp; 0 for -inf.
FI_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(x) within 2^-22 absolute near 1, 2 ulp elsewhere.
FI_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1/x within 1 ulp.
FI_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// x + 0 (PTX ISA 9.7.3.3): -0 becomes +0, and every NaN the canonical one, 0x7fffffff; the rest stays, subnormals too.
FI_DEVICE float canonical(float x) {
  float y;
  asm("add.rn.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two; NaN if one is (PTX ISA 9.7.3.12).
FI_DEVICE float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace fi
