// sample on sm_90: a row lies in the shared memory of a cluster of blocks, and is read from global memory once.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/sampling/sample.cuh"

namespace fi {
namespace sampling {

struct Cluster {
  static constexpr unsigned kLargest = 16;
  FI_DEVICE static unsigned rank() { return cluster_rank(); }
  FI_DEVICE static unsigned size() { return cluster_size(); }
  FI_DEVICE static void sync() { cluster_sync(); }
  FI_DEVICE static uint4 read(const Counter& x, unsigned rank) { return cluster_load_u32x4(cluster_address(&x, rank)); }
  FI_DEVICE static void write(Total& to, unsigned rank, uint4 x) { cluster_store_u32x4(cluster_address(&to, rank), x); }
  FI_DEVICE static void write(uint64_t& to, unsigned rank, uint64_t x) {
    cluster_store_u64(cluster_address(&to, rank), x);
  }
  // A block holds at most 2^16 elements, so halves of their weights add up in a word, and nothing waits for an answer.
  static constexpr int kHighAt = 16;
  FI_DEVICE static void add(Counter& to, uint32_t weight) {
    atomicAdd(&to.count, 1u);
    if (weight & 0xffff) atomicAdd(&to.low, weight & 0xffff);
    if (weight >> 16) atomicAdd(&to.high, weight >> 16);
  }
};

// The slots of a warp: those before `kept` in shared memory, others in global memory, or L2 rather.
template <class T>
struct KeptRow {
  static constexpr int kVec = Slots<T>::kVec;
  const T* shared;  // of slot 0
  int kept;
  GlobalRow<T> rest;
  FI_DEVICE Vec<T, kVec> load(int slot) const {
    return slot < kept ? fi::load<T, kVec>(shared + slot) : rest.load(slot);
  }
};

// Starts to fill the slots [begin, end) of this warp. What the row does not fill to 16 bytes at its ends is copied by
// hand, so nothing outside of it is read.
template <class T>
FI_DEVICE void load_slots(T* to, const Slots<T>& row, int begin, int end, Barrier& barrier) {
  constexpr int kVec = Slots<T>::kVec;
  const int lane = threadIdx.x % 32;
  const int from = max(begin, (row.first + kVec - 1) & -kVec), until = max(from, min(end, row.last & -kVec));
  if (lane == 0) {
    barrier.init(1);
    fence_barrier_init();
    const unsigned bytes = (until - from) * sizeof(T);
    barrier.arrive_expect(bytes);
    if (bytes) bulk_load(to + from, row.base + from, bytes, barrier, kEvictFirst);
  }
  const auto by_hand = [&](int low, int high) {
    for (int slot = low + lane; slot < high; slot += 32)
      to[slot] = slot >= row.first && slot < row.last ? row.base[slot] : not_a_number<T>();
  };
  by_hand(begin, min(end, from));
  by_hand(max(begin, until), end);
  __syncwarp();
}

// Brings the slots [begin, end) of the row into L2.
template <class T>
FI_DEVICE void prefetch_slots(const Slots<T>& row, int begin, int end) {
  constexpr int kVec = Slots<T>::kVec;
  const int from = max(begin, (row.first + kVec - 1) & -kVec), until = min(end, row.last & -kVec);
  if (threadIdx.x % 32 == 0 && from < until) bulk_prefetch(row.base + from, (until - from) * sizeof(T));
}

}  // namespace sampling

// One cluster a row: block r holds slots [r * p.slice, (r + 1) * p.slice).
template <class T, int kThreads>
FI_DEVICE void sample_cluster(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  extern __shared__ uint4 dynamic[];
  __shared__ Scratch<Cluster, kWarps> shared;
  __shared__ Barrier barriers[kWarps];
  T* slots = reinterpret_cast<T*>(dynamic);
  const int warp = threadIdx.x / 32;
  clear(shared);
  pdl_wait();
  const int64_t output = blockIdx.x / cluster_size(), row = source_row(p, output);
  if (missing(p, output, row)) return;  // all blocks of the cluster
  cluster_arrive();
  Slots<T> here(static_cast<const T*>(p.input) + row * p.input_row, p.vocab);
  const int skipped = cluster_rank() * p.slice;
  const int used = max(0, min(p.slice, warp_share(here.last, 1) - skipped));  // whole pieces
  here.base += skipped, here.first -= skipped, here.last -= skipped;
  const int share = warp_share(p.slice, kWarps), kept = min(p.kept, share);
  const int begin = min(warp * share, used), end = min(begin + share, used), until = min(begin + kept, end);
  T* mine = slots + warp * (kept - share);  // of slot 0 of the block
  load_slots(mine, here, begin, until, barriers[warp]);
  prefetch_slots(here, until, end);
  const uint64_t random = random_of(row_random(p, output));  // while the row is on its way
  cluster_wait();                                            // now all blocks are there
  barriers[warp].wait(0);
  if constexpr (sizeof(T) == 4) {
    if (is_adjusted(p)) {
      __syncthreads();
      const int low = -here.first;  // the token of slot 0; all slots are kept
      penalise(p, slots - min(low, 0), max(low, 0), min(low + used, p.vocab), output, row);
      __syncthreads();
      for (int slot = begin + threadIdx.x % 32; slot < end; slot += 32)
        if (low + slot >= 0 && low + slot < p.vocab) slots[slot] = biased(p, slots[slot], low + slot, output);
      __syncwarp();
    }
  }
  const KeptRow<T> source{mine, until, {here}};
  run_row<T, Cluster, KeptRow<T>, kWarps>(p, shared, source, begin, end, here.first, here.last, output, row, random);
  cluster_sync();  // others may still read this block's sums
}

}  // namespace fi
