// Stores to global memory as single PTX instructions (PTX ISA, st), prefetch into L2, and the fence of the device
// (membar).
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// NOTE: not left to the compiler, which writes 16 bytes as four words where its vectoriser does not see through
// the address (CUDA 13.0: the last store of a kernel behind a condition).
FI_DEVICE void store_global(void* p, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
FI_DEVICE void store_global(void* p, uint2 x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y) : "memory");
}

// The line at p on its way into L2; L2 is where all writes meet, so it is never stale.
FI_DEVICE void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// Adds to a counter of the device; whoever sees that by load_acquire sees what this thread wrote before, and what it
// has seen by way of a barrier.
FI_DEVICE void add_release(int* p, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(x) : "memory");
}
FI_DEVICE int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(p)) : "memory");
  return x;
}

// Orders this thread's accesses, and those it has seen by way of a barrier, for all threads of the device. Cheaper than
// __threadfence(), which is sequentially consistent.
FI_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace fi
