// The mbarrier pipeline: a ring of shared-memory stages that producers fill and consumers free.
#pragma once
#include "fi/cuda/ptx/mbarrier_sm90.cuh"

namespace fi {

// A position in a ring: the stage, and the parity of the phase to wait for there. Each role has a separate state. A
// producer's state begins at phase 1: no wait of the first pass through the ring blocks, as all stages are empty.
struct PipelineState {
  int stage = 0, phase = 0;

  FI_DEVICE static PipelineState producer() { return {0, 1}; }
  // The states of use number `use` of a ring of kStages stages, counted from 0.
  template <int kStages, class Count>
  FI_DEVICE static PipelineState consumer_at(Count use) {
    return {static_cast<int>(use % kStages), static_cast<int>(use / kStages % 2)};
  }
  template <int kStages, class Count>
  FI_DEVICE static PipelineState producer_at(Count use) {
    return {static_cast<int>(use % kStages), static_cast<int>(use / kStages % 2 ^ 1)};
  }
  // stages: the stages in use; at most those of the ring.
  FI_DEVICE void advance(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// A stage is full when all producer arrivals and all expected bytes are in, and empty when all consumers have released
// it; at first all stages are empty. A producer runs acquire, then one of expect (TMA and bulk copies), commit_copies
// (cp.async) and commit (plain stores). A consumer runs wait, then release.
template <int kRingStages>
struct Pipeline {
  static constexpr int kStages = kRingStages;
  Barrier full[kStages], empty[kStages];

  // By one thread; then fence_barrier_init and a barrier of the CTA or cluster. Arrivals are those of one stage.
  FI_DEVICE void init(unsigned producers, unsigned consumers) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(producers);
      empty[i].init(consumers);
    }
  }

  // Waits until consumers have released the stage.
  FI_DEVICE void acquire(const PipelineState& at) { empty[at.stage].wait(at.phase); }
  // One arrival, and the bytes that copies to the returned barrier complete.
  FI_DEVICE Barrier& expect(int stage, unsigned bytes) {
    full[stage].arrive_expect(bytes);
    return full[stage];
  }
  // One arrival when this thread's cp.async copies so far have landed.
  FI_DEVICE void commit_copies(int stage) { full[stage].arrive_copies(); }
  // One arrival. Plain stores that wgmma or TMA reads take fence_async_shared before.
  FI_DEVICE void commit(int stage) { full[stage].arrive(); }

  // Waits until producers have filled the stage. Where a producer that has arrived did not fence plain stores or
  // cp.async, a reader by wgmma or TMA takes fence_async_shared behind it.
  FI_DEVICE void wait(const PipelineState& at) { full[at.stage].wait(at.phase); }
  // Plain reads take no fence before a copy fills the stage again (docs/notes/synchronisation-fences).
  FI_DEVICE void release(int stage) { empty[stage].arrive(); }
};

}  // namespace fi
