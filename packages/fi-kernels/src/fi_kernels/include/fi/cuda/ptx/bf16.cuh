// Arithmetic on pairs of bf16.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

FI_DEVICE unsigned multiply_bf16x2(unsigned a, unsigned b) {
  unsigned y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

}  // namespace fi
