// bar.sync (PTX ISA 9.7.13.1): barriers of some warps of a block.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// Waits for `threads` threads, a multiple of 32, at barrier 1..15 (0 is that of __syncthreads).
FI_DEVICE void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fi
