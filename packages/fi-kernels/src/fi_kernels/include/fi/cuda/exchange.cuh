// Threads of a warp that exchange registers, so that each has contiguous data to store.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

// Of four neighbouring lanes, lane t gets word t of each: x of lane i becomes y with y[i] = x[t].
FI_DEVICE uint4 transpose_of_four(const unsigned (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const unsigned a = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
  const unsigned b = __shfl_xor_sync(0xffffffffu, odd ? x[2] : x[3], 1);
  const unsigned y[4] = {odd ? a : x[0], odd ? x[1] : a, odd ? b : x[2], odd ? x[3] : b};
  const unsigned c = __shfl_xor_sync(0xffffffffu, upper ? y[0] : y[2], 2);
  const unsigned d = __shfl_xor_sync(0xffffffffu, upper ? y[1] : y[3], 2);
  return {upper ? c : y[0], upper ? d : y[1], upper ? y[2] : c, upper ? y[3] : d};
}

}  // namespace fi
