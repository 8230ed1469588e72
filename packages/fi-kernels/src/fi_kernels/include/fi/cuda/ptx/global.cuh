// Stores to global memory as single PTX instructions (PTX ISA, st), prefetch into L2, and the fence of the device
// (membar).
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

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

// Loads that stay in front of what follows: the compiler moves plain ones behind branches that need other loads.
FI_DEVICE uint2 load_here(const void* p) {
  uint2 x;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(__cvta_generic_to_global(p)));
  return x;
}
// Leaves x as it is unless `exists`.
FI_DEVICE void load_here_if(bool exists, uint4& x, const void* p) {
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      "setp.ne.s32 exists, %5, 0;\n"
      "@exists ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(__cvta_generic_to_global(p)), "r"(int{exists}));
}

// 16 bytes that are not needed again soon: they take no place in L1, and L2 gives them up first unless they are wanted
// again from there.
FI_DEVICE uint4 load_once(const void* p, bool again = false) {
  const uint64_t policy = again ? 0x1000000000000000ull : 0x12F0000000000000ull;  // evict_first (see bulk_sm90.cuh)
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(__cvta_generic_to_global(p)), "l"(policy));
  return x;
}

// Stores 16 bytes that are not read again soon: L2 gives them up first.
FI_DEVICE void store_once(void* p, uint4 x) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// Prefetches the line at p into L2, which all SMs share: the line is never stale.
FI_DEVICE void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// Adds 1 to a counter of the device and returns what it was. Orders this thread's accesses, and those it has seen by
// way of a barrier: who finds a larger value sees what was written before.
FI_DEVICE int count_device(int* counter) {
  delay<kDelayCounters>();
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}
// The same modulo `modulus`.
FI_DEVICE uint32_t count_device(uint32_t* counter, uint32_t modulus) {
  delay<kDelayCounters>();
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(modulus - 1)
               : "memory");
  return before;
}
// The value of a counter. What this thread did before is seen by all who count later, as by an increment.
FI_DEVICE uint32_t meet_device(uint32_t* counter) {
  delay<kDelayCounters>();
  uint32_t x;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 0;"
               : "=r"(x)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return x;
}
// Adds 1 to a counter of the device, as count_device does, without the value: the thread does not wait for it.
FI_DEVICE void signal_device(int* counter) {
  delay<kDelayCounters>();
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(counter)) : "memory");
}
// The value of a counter that other CTAs increment by count_device or signal_device. Orders later accesses of this
// thread, and of those that meet it at a barrier, behind what the counting threads did before.
FI_DEVICE int load_device(const int* counter) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(counter)) : "memory");
  delay<kDelayCounters>();
  return x;
}
FI_DEVICE uint32_t load_device(const uint32_t* counter) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(counter)) : "memory");
  delay<kDelayCounters>();
  return x;
}

}  // namespace fi
