// Roles of warps and warpgroups in a CTA: who a thread is, register budgets (setmaxnreg), named barriers.
#pragma once
#include "fi/cuda/ptx/barrier.cuh"
#include "fi/cuda/ptx/warpgroup_sm90.cuh"
#include "fi/types.h"

namespace fi {

constexpr int kWarpgroup = 128;  // threads

// The value of lane 0, known to be the same in all lanes: wgmma behind a branch on it need not be serialised.
FI_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

FI_DEVICE int warp_index() { return uniform(threadIdx.x / 32); }
FI_DEVICE int warpgroup_index() { return uniform(threadIdx.x / kWarpgroup); }

// Whether warpgroups may raise their registers to these sums: a CTA begins with 65536 registers shared out evenly by
// eights, and setmaxnreg waits for registers that nobody gives back.
FI_HOST_DEVICE constexpr bool registers_fit(int sum, int warpgroups) {
  return sum <= 512 / warpgroups / 8 * 8 * warpgroups;
}

// All threads of a warpgroup meet. Barrier 0 is that of __syncthreads.
FI_DEVICE void warpgroup_sync(int barrier) { barrier_sync(barrier, kWarpgroup); }

}  // namespace fi
