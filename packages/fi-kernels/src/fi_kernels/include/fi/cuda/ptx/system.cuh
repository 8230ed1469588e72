// Accesses that other devices of the host see and make (PTX ISA, ld and st with .relaxed.sys), and the clock of the
// device.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

// NOTE: not cached in L1, whose lines would hide what another device has written since.
FI_DEVICE uint4 load_system(const void* p) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return x;
}
FI_DEVICE uint32_t load_system_word(const void* p) {
  uint32_t x;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(p)) : "memory");
  return x;
}
FI_DEVICE void store_system(void* p, uint4 x) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x),
               "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
FI_DEVICE void store_system_word(void* p, uint32_t x) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(x) : "memory");
}
// Orders this thread's plain accesses and those of its bulk copies, in both directions.
FI_DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// A flag: what this thread wrote before the store is visible to who loads the flag's value.
FI_DEVICE void store_flag(void* p, uint32_t x) {
  delay<kDelayCounters>();
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(x) : "memory");
}
FI_DEVICE uint32_t load_flag(const void* p) {
  uint32_t x;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(p)) : "memory");
  delay<kDelayCounters>();
  return x;
}
// Nanoseconds; it advances in steps of up to a microsecond.
FI_DEVICE uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

}  // namespace fi
