// grid_sync in two halves: a CTA works between its arrival and its wait for the others.
#pragma once
#include "fi/cuda/ptx/grid_sync.cuh"

namespace fi {

// By one thread of each CTA, behind a barrier of those whose writes the others are to see. Returns what grid_await
// takes.
FI_DEVICE uint32_t grid_arrive() {
  delay<kDelayCounters>();
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(grid_barrier())),
                 "r"(blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u)
               : "memory");
  return before;
}
// By the same thread, before a barrier of those who are to see what others wrote.
FI_DEVICE void grid_await(uint32_t before) {
  while (((load_device(grid_barrier()) ^ before) & 0x80000000u) == 0) {
  }
}

}  // namespace fi
