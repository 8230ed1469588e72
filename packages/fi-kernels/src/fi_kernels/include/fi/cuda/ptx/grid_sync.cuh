// The barrier of all CTAs of a cooperative launch, in memory that the driver owns.
#pragma once
#include "fi/cuda/ptx/global.cuh"

namespace fi {

// The driver gives a cooperative launch {size, barrier}, whose address is in %envreg1 (upper half) and %envreg2.
// NOTE: cooperative_groups.h compiles the same into programs, so drivers keep it.
FI_DEVICE uint32_t* grid_barrier() {
  uint32_t upper, lower;
  asm("mov.u32 %0, %%envreg1;" : "=r"(upper));
  asm("mov.u32 %0, %%envreg2;" : "=r"(lower));
  return reinterpret_cast<uint32_t*>(static_cast<uint64_t>(upper) << 32 | lower) + 1;
}

// By all threads of all CTAs of a cooperative launch. What they did before is visible to all of them after. The last
// CTA to arrive flips the highest bit of the barrier and leaves the others zero, so nothing resets it.
FI_DEVICE void grid_sync() {
  __syncthreads();
  if (threadIdx.x == 0) {
    constexpr uint32_t kFlip = 0x80000000u;
    uint32_t* barrier = grid_barrier();
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(barrier)), "r"(blockIdx.x == 0 ? kFlip - (gridDim.x - 1) : 1u)
                 : "memory");
    while (((load_device(barrier) ^ before) & kFlip) == 0) {
    }
  }
  __syncthreads();
}

}  // namespace fi
