// Elementary float functions of device code, under the names that code shared with the CPU takes as `Math`.
#pragma once
#include "fi/cuda/ptx/math.cuh"

namespace fi {

// A handful of instructions each: they are inlined for each of dozens of scores in registers.
struct CudaMath {
  FI_DEVICE static float exp2(float x) { return exp2_approx(x); }
  FI_DEVICE static float log2(float x) { return log2_approx(x); }
  FI_DEVICE static float erf(float x) { return erff(x); }
  FI_DEVICE static float magnitude(float x) { return fabsf(x); }
  // The limit if x is NaN.
  FI_DEVICE static float at_least(float x, float limit) { return fmaxf(x, limit); }
  FI_DEVICE static float at_most(float x, float limit) { return fminf(x, limit); }
  // x * sigmoid(z) = x / (1 + e^-z). The lower bound of x prevents -inf / inf: the limit at -inf is -0. NaN stays NaN.
  FI_DEVICE static float scaled_sigmoid(float x, float z) {
    constexpr float log2e = 1.4426950408889634f;
    return __fdividef(fmaxf(x, -200.f), 1.f + exp2_approx(-log2e * z));
  }
  // Within 2^-22, absolute: what a score needs.
  FI_DEVICE static float tanh(float x) {
    constexpr float two_log2e = 2.8853900817779268f;
    return 1.f - 2.f * reciprocal_approx(1.f + exp2_approx(two_log2e * x));
  }
};

}  // namespace fi
