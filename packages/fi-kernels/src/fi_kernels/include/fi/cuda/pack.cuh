// Pairs of floats rounded to two 16-bit elements in one register.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// `low` becomes the lower half of the word. The third argument gives the type.
FI_DEVICE unsigned pack_pair(float low, float high, __half) {
  const __half2 x = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(x);
}
FI_DEVICE unsigned pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(x);
}

}  // namespace fi
