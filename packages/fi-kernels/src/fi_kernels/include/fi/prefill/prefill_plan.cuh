// Planner of batch prefill: one block lists the tiles of all requests, longest first, by counting.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/prefill/prefill_plan.h"

namespace fi {

// Tiles of about equal work come in any order: which block takes a tile changes no result.
FI_DEVICE void prefill_plan(const PrefillPlanParams& p) {
  constexpr int kLevels = 1024;
  __shared__ int32_t place[kLevels], most, total;
  const int threads = blockDim.x, warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kLevels; i += threads) place[i] = 0;
  if (threadIdx.x == 0) most = 0;
  pdl_wait();
  __syncthreads();
  for (int b = warp; b < p.batch; b += warps) {
    const PrefillRequest r = p.request(b);
    if (lane == 0) p.schedule.requests[b] = r;
    int work = 0;
    for (int t = lane; t < p.tiles(r); t += 32) work = max(work, p.work(r, t));
    atomicMax(&most, work);
  }
  __syncthreads();
  int shift = 0;
  while ((most >> shift) >= kLevels) ++shift;
  for (int b = warp; b < p.batch; b += warps) {
    const PrefillRequest r = p.request(b);
    for (int t = lane; t < p.tiles(r); t += 32) atomicAdd(&place[kLevels - 1 - (p.work(r, t) >> shift)], 1);
  }
  __syncthreads();
  if (warp == 0) {  // exclusive sums
    int before = 0;
    for (int i = lane; i < kLevels; i += 32) {
      const int count = place[i];
      int sum = count;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
      }
      place[i] = before + sum - count;
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) total = before;
  }
  __syncthreads();
  for (int b = warp; b < p.batch; b += warps) {
    const PrefillRequest r = p.request(b);
    for (int t = lane; t < p.tiles(r); t += 32) {
      const int at = atomicAdd(&place[kLevels - 1 - (p.work(r, t) >> shift)], 1);
      if (at < p.capacity) p.schedule.items[at] = {b, t};
    }
  }
  if (threadIdx.x == 0) {
    p.schedule.header[0] = min(total, p.capacity);
    p.schedule.header[1] = 0;
    p.schedule.header[2] = 0;
  }
}

}  // namespace fi
