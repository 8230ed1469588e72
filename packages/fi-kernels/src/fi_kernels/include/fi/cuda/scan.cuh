// Sums of integers over the threads before one.
#pragma once
#include "fi/cuda/convert.cuh"

namespace fi {

// The sum of x over the threads before this one, of a CTA of kWarps warps. Two barriers; `sums` is kWarps words of
// shared memory, which may be used again behind them.
template <int kWarps>
FI_DEVICE int exclusive_sum(int x, int* sums) {
  static_assert(kWarps > 1 && kWarps <= 32, "a lane has the sum of a warp");
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = sums[lane % kWarps];
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  const int of_warps = __shfl_sync(0xffffffffu, before, max(warp - 1, 0));
  __syncthreads();
  return sum - x + (warp ? of_warps : 0);
}

}  // namespace fi
