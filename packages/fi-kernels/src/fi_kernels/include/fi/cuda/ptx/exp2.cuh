// The hardware's power of two (PTX ISA, ex2.approx): one instruction, relative error 2^-22.5, subnormals are zero.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

FI_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fi
