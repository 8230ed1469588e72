// cp.async.bulk (PTX ISA 9.7.9.25.4): one thread copies a contiguous run; addresses and size are multiples of 16 bytes.
#pragma once
#include "fi/cuda/ptx/mbarrier_sm90.cuh"

namespace fi {

// How L2 treats lines (createpolicy encodings that the PTX ISA gives as examples of fractional policies of 1.0).
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull, kEvictNormal = 0x1000000000000000ull,
                   kEvictLast = 0x14F0000000000000ull;

// Global to this CTA's shared memory; the bytes complete on the barrier.
FI_DEVICE void bulk_load(void* shared, const void* global, unsigned bytes, Barrier& barrier) {
  delay<kDelayCopies>();
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier.address())
               : "memory");
}
FI_DEVICE void bulk_load(void* shared, const void* global, unsigned bytes, Barrier& barrier, uint64_t policy) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier.address()), "l"(policy)
      : "memory");
}
// To the same place of the CTAs of the cluster whose bits `ctas` has; the bytes complete on the barrier of each.
FI_DEVICE void bulk_load_multicast(void* shared, const void* global, unsigned bytes, Barrier& barrier, uint16_t ctas) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier.address()), "h"(ctas)
      : "memory");
}
// Shared memory of this CTA to that of another CTA of the cluster, by addresses; the bytes complete on its barrier.
FI_DEVICE void bulk_send(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
  delay<kDelayCopies>();
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Orders this thread's plain accesses to global memory, and those it has seen, before later bulk copies.
FI_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Prefetches global memory into L2.
FI_DEVICE void bulk_prefetch(const void* global, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}
// Shared memory to global, in this thread's current group.
FI_DEVICE void bulk_store(void* global, const void* shared, unsigned bytes) {
  delay<kDelayCopies>();
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "r"(bytes)
               : "memory");
}
FI_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but kPending of this thread's groups are complete: their writes are visible to this thread.
template <int kPending>
FI_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Until the sources of all but kPending of this thread's groups may be overwritten.
template <int kPending>
FI_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace fi
