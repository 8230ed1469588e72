// Named barriers of a block (PTX ISA 9.7.13.1): bar.sync waits, bar.arrive does not; `threads` is how many do either.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

FI_DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
FI_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace fi
