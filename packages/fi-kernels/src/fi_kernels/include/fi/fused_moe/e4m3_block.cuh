// Sixteen floats of a thread as e4m3, with the scale of the 128 of eight lanes.
#pragma once
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/e4m3_block.h"

namespace fi {

FI_DEVICE void store_e4m3(void* to, const float (&x)[16]) {
  Vec<__nv_fp8_e4m3, 16> out;
  from_float(x, out);
  store(static_cast<__nv_fp8_e4m3*>(to), out);
}

// The scale of the 128 values of eight lanes; x is divided by it. By all lanes of a warp.
FI_DEVICE float scale_block(float (&x)[16]) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(x[i]));
  amax = fmaxf(warp_max(amax, 8), kMinBlockMax);
  const float inverse = kE4m3Max / amax;
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] *= inverse;
  return amax * (1.f / kE4m3Max);
}

}  // namespace fi
