// Named barriers of a block (PTX ISA 9.7.13.1): bar.sync waits, bar.arrive does not; `threads`, a multiple of 32, is
// how many do either. Barrier 0 is that of __syncthreads.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

FI_DEVICE void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
FI_DEVICE void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fi
