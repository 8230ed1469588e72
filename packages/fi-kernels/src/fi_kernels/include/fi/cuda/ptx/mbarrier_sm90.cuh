// mbarrier objects (PTX ISA 9.7.13.15) that count arrivals of threads and bytes of asynchronous copies.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

// In shared memory, 8-byte aligned. A phase ends when all arrivals and all expected bytes are in; the parity to wait
// for is 0 first, then alternates.
struct Barrier {
  uint64_t state;

  FI_DEVICE unsigned address() const { return static_cast<unsigned>(__cvta_generic_to_shared(this)); }

  // By one thread; then fence_barrier_init and a barrier of the CTA or cluster before anyone uses it.
  FI_DEVICE void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  FI_DEVICE void arrive() {
    delay<kDelayArrivals>();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  // Several arrivals at once.
  FI_DEVICE void arrive(unsigned count) {
    delay<kDelayArrivals>();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }
  // At this barrier of another CTA of the cluster. Says only that this thread has read what that CTA overwrites: data
  // goes with complete_tx, so that neither this nor a wait needs the order of the cluster, which costs a fence of the
  // device.
  FI_DEVICE void arrive_at(unsigned rank) {
    delay<kDelayArrivals>();
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(address()),
        "r"(rank)
        : "memory");
  }
  // One arrival, and `bytes` more that copies complete in this phase.
  FI_DEVICE void arrive_expect(unsigned bytes) {
    delay<kDelayArrivals>();
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  // One arrival when this thread's cp.async copies so far are done.
  FI_DEVICE void arrive_copies() {
    delay<kDelayArrivals>();
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address()) : "memory");
  }
  FI_DEVICE bool try_wait(unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
    return done != 0;
  }
  // The same without suspending the thread.
  FI_DEVICE bool test_wait(unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
    return done != 0;
  }
  FI_DEVICE void wait(unsigned parity) {
    delay<kDelayWaits>();
    const WaitLimit limit;
    while (!try_wait(parity)) limit.check();
    delay<kDelayWaited>();
  }
};

// Makes initialised barriers visible to the cluster and to asynchronous copies.
FI_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders this thread's plain shared-memory accesses before later asynchronous ones (bulk copies, wgmma).
FI_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace fi
