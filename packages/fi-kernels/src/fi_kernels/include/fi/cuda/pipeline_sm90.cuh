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

// What fills a stage: TMA and bulk copies alone, or also stores and cp.async of threads.
enum class Writer { kCopies, kThreads };
// What reads a stage: wgmma and TMA, which see memory through another proxy than threads; loads of threads; or both.
enum class Reader { kProducts, kLoads, kBoth };

// A stage is full when all producer arrivals and all expected bytes are in, and empty when all consumers have released
// it; at first all stages are empty. A producer runs acquire, then one of expect (TMA and bulk copies), commit_copies
// (cp.async) and commit or commit_warp (stores). A consumer runs wait, then one of the releases. A commit or release of
// a warp contains the order that writer and reader need (docs/notes/synchronisation-order).
template <int kRingStages, Writer kWriter, Reader kReader>
struct Pipeline {
  static constexpr int kStages = kRingStages;
  // Whether threads fence what they have stored: wgmma reads it.
  static constexpr bool kFences = kWriter == Writer::kThreads && kReader != Reader::kLoads;
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
  // One arrival, of a thread for what it alone has stored and threads load.
  FI_DEVICE void commit(int stage) { full[stage].arrive(); }
  // One arrival of a warp for what all its lanes have stored.
  FI_DEVICE void commit_warp(int stage, int lane = threadIdx.x % 32) {
    static_assert(kWriter == Writer::kThreads, "copies arrive by themselves");
    if constexpr (kFences) fence_async_shared();
    __syncwarp();
    if (lane == 0) full[stage].arrive();
  }

  // Waits until producers have filled the stage.
  FI_DEVICE void wait(const PipelineState& at) { full[at.stage].wait(at.phase); }
  // One arrival, of a thread for what it alone has read, or all have before a barrier. Loads take no proxy fence before
  // a copy fills the stage again (docs/notes/synchronisation-fences).
  FI_DEVICE void release(int stage) { empty[stage].arrive(); }
  // One arrival of a warp for all its lanes. Of a wgmma they have waited together, as wgmma.wait_group is aligned.
  FI_DEVICE void release_warp(int stage, int lane = threadIdx.x % 32) {
    if constexpr (kReader != Reader::kProducts) __syncwarp();
    if (lane == 0) empty[stage].arrive();
  }
  // One arrival of a warpgroup for its four warps, behind a wait for a wgmma of all four. NOTE: that no warp still
  // reads when one sees the end is not written; CUTLASS frees stages of clusters so, and random delays of single warps
  // behind waits change no bit (docs/notes/synchronisation-delays).
  FI_DEVICE void release_warpgroup(int stage, int thread = threadIdx.x % 128) {
    static_assert(kReader == Reader::kProducts, "loads of other warps may still run");
    if (thread == 0) empty[stage].arrive();
  }
};

// By a warp that has read stage `from` and stored stage `to` of another ring: both arrivals behind one fence, which
// also comes before a copy fills `from` again.
template <class Read, class Written>
FI_DEVICE void pass_on_warp(Read& read, int from, Written& written, int to, int lane = threadIdx.x % 32) {
  static_assert(Written::kFences, "without a fence: release_warp, then commit_warp");
  fence_async_shared();
  __syncwarp();
  if (lane == 0) {
    read.release(from);
    written.commit(to);
  }
}

}  // namespace fi
