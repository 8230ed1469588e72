// Elementary float functions of device code, under the names that code shared with the CPU takes as `Math`.
#pragma once
#include "fi/cuda/ptx/math.cuh"

namespace fi {

// A handful of instructions each: they are inlined dozens of times where scores lie in registers.
struct CudaMath {
  FI_DEVICE static float exp2(float x) { return exp2_approx(x); }
  FI_DEVICE static float log2(float x) { return log2_approx(x); }
  // Within 2^-22, absolute: what a score needs.
  FI_DEVICE static float tanh(float x) {
    constexpr float two_log2e = 2.8853900817779268f;
    return 1.f - 2.f * reciprocal_approx(1.f + exp2_approx(two_log2e * x));
  }
};

}  // namespace fi
