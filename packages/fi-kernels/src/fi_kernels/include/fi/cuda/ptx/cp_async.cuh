// cp.async (PTX ISA 9.7.9.25.3): copies of 16, 8 or 4 bytes from global to shared memory that bypass registers, sm_80
// and later.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

// Copies 16 bytes past L1, or writes zeros if `valid` is false; the source is not read then.
FI_DEVICE void cp_async_16(unsigned shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(__cvta_generic_to_global(global)),
               "r"(valid ? 16 : 0)
               : "memory");
}
FI_DEVICE void cp_async_16(void* shared, const void* global, bool valid = true) {
  cp_async_16(static_cast<unsigned>(__cvta_generic_to_shared(shared)), global, valid);
}
// Copies the first `bytes` of 16 and writes zeros behind them; the source is not read beyond.
FI_DEVICE void cp_async_16_part(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(__cvta_generic_to_global(global)),
               "r"(bytes)
               : "memory");
}
FI_DEVICE void cp_async_16_part(void* shared, const void* global, int bytes) {
  cp_async_16_part(static_cast<unsigned>(__cvta_generic_to_shared(shared)), global, bytes);
}
// As cp_async_16 with an L2 policy: kEvictFirst or kEvictNormal. sm_90.
// NOTE: with an address in two parts, one of them in a uniform register, ptxas 13.0 makes an illegal instruction.
FI_DEVICE void cp_async_16_hinted(unsigned shared, const void* global, bool valid, uint64_t policy) {
  auto address = __cvta_generic_to_global(global);
  asm volatile("" : "+l"(address));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(address),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
// As cp_async_16 of 8 bytes, through L1.
FI_DEVICE void cp_async_8(unsigned shared, const void* global, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(__cvta_generic_to_global(global)),
               "r"(valid ? 8 : 0)
               : "memory");
}
FI_DEVICE void cp_async_8(void* shared, const void* global) {
  cp_async_8(static_cast<unsigned>(__cvta_generic_to_shared(shared)), global);
}
// The same of 4 bytes, through L1.
FI_DEVICE void cp_async_4(unsigned shared, const void* global, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(__cvta_generic_to_global(global)),
               "r"(valid ? 4 : 0)
               : "memory");
}
FI_DEVICE void cp_async_4(void* shared, const void* global) {
  cp_async_4(static_cast<unsigned>(__cvta_generic_to_shared(shared)), global);
}
// The same of 4, 8 or 16 bytes.
template <int kBytes>
FI_DEVICE void cp_async_small(void* shared, const void* global, bool valid) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16)
    cp_async_16(to, global, valid);
  else if constexpr (kBytes == 8)
    cp_async_8(to, global, valid);
  else
    cp_async_4(to, global, valid);
}
// Closes a group of this thread's copies.
FI_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are in flight.
template <int kPending>
FI_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fi
