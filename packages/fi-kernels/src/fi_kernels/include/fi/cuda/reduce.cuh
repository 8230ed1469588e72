// Sums and maxima over a warp, part of a warp, and a CTA; the order depends on the number of threads only (batch
// invariance).
#pragma once
#include "fi/cuda/convert.cuh"

namespace fi {

// Over aligned groups of `lanes` (a power of two <= 32); every lane gets the sum.
FI_DEVICE float warp_sum(float x, int lanes = 32) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The largest over such a group; NaN is ignored.
FI_DEVICE float warp_max(float x, int lanes = 32) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Over the CTA (a multiple of 32 threads); every thread gets the sum. One barrier; `partial` is 32 floats of shared
// memory that nothing else uses until the CTA's next barrier.
FI_DEVICE float block_sum(float x, float* partial) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  const int warps = blockDim.x / 32;
  return warp_sum(static_cast<int>(threadIdx.x % 32) < warps ? partial[threadIdx.x % 32] : 0.f);
}

// The largest of non-negative values over the CTA, in the same way; NaN is ignored.
FI_DEVICE float block_max(float x, float* partial) {
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  const int warps = blockDim.x / 32;
  return warp_max(static_cast<int>(threadIdx.x % 32) < warps ? partial[threadIdx.x % 32] : 0.f);
}

}  // namespace fi
