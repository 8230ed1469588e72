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
  FI_DEVICE static uint32_t read(const uint32_t& x, unsigned rank) {
    return cluster_load_u32(cluster_address(&x, rank));
  }
  FI_DEVICE static void write(uint32_t& to, unsigned rank, uint32_t x) {
    cluster_store_u32(cluster_address(&to, rank), x);
  }
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

// The slots of a warp: the first of them in shared memory, the rest in global memory (after the first read, in L2).
template <class T>
struct ClusterRow {
  static constexpr int kVec = Slots<T>::kVec;
  const T* shared;  // of slot 0, if it were held
  int held;         // slots before it are
  GlobalRow<T> global;

  FI_DEVICE Vec<T, kVec> load(int slot) const {
    return slot < held ? fi::load<T, kVec>(shared + slot) : global.load(slot);
  }
  FI_DEVICE float at(int slot) const { return slot < held ? to_float(shared[slot]) : global.at(slot); }
};

// Starts to fill the slots [begin, end) of this warp. What the row does not fill to 16 bytes at its ends is copied by
// hand, so nothing outside of it is read.
template <class T>
FI_DEVICE void load_slots(T* to, const Slots<T>& row, int begin, int held, int end, Barrier& barrier) {
  constexpr int kVec = Slots<T>::kVec;
  const int lane = threadIdx.x % 32, low = (row.first + kVec - 1) / kVec * kVec, high = row.last / kVec * kVec;
  const int from = max(begin, low), until = max(from, min(held, high));
  if (lane == 0) {
    barrier.init(1);
    fence_barrier_init();
    const unsigned bytes = (until - from) * sizeof(T);
    barrier.arrive_expect(bytes);
    if (bytes) bulk_load(to + from, row.base + from, bytes, barrier, kEvictFirst);
    const int rest = max(held, low), rest_end = min(end, high);
    if (rest < rest_end) bulk_prefetch(row.base + rest, (rest_end - rest) * sizeof(T));
  }
  const auto by_hand = [&](int low, int high) {
#pragma unroll 1
    for (int slot = low + lane; slot < high; slot += 32)
      to[slot] = slot >= row.first && slot < row.last ? row.base[slot] : not_a_number<T>();
  };
  by_hand(begin, min(held, from));
  by_hand(max(begin, until), held);
  __syncwarp();
}

}  // namespace sampling

// One cluster a row: block r holds slots [r * p.slice, (r + 1) * p.slice).
template <class T, int kThreads>
FI_DEVICE void sample_cluster(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  __shared__ Scratch<Cluster, kWarps> shared;
  __shared__ Barrier barriers[kWarps];
  const int warp = threadIdx.x / 32;
  uint64_t* marks = marks_of(p, warp);
  T* slots = reinterpret_cast<T*>(marks_of(p, kWarps));
  clear(shared);
  pdl_wait();
  const int64_t output = blockIdx.x / cluster_size(), row = source_row(p, output);
  if (missing(p, output, row)) return;  // all blocks of the cluster
  cluster_arrive();
  Slots<T> whole(static_cast<const T*>(p.input) + row * p.input_row, p.vocab);
  const int skipped = cluster_rank() * p.slice;
  whole.base += skipped, whole.first -= skipped, whole.last -= skipped;
  const int used = max(0, min(p.slice, warp_share(whole.last, 1)));  // whole pieces
  const int begin = min(warp * p.share, used), end = min(begin + p.share, used), held = min(begin + p.held, end);
  slots += warp * (p.held - p.share);
  load_slots(slots, whole, begin, held, end, barriers[warp]);
  const uint64_t random = random_of(row_random(p, output));  // while the row is on its way
  cluster_wait();                                            // now all blocks are there
  barriers[warp].wait(0);
  if constexpr (sizeof(T) == 4) {
    if (is_adjusted(p)) {
      __syncthreads();
      const int low = -whole.first;  // the token of slot 0
      penalise(p, slots - min(low, 0), max(low, 0), min(low + used, p.vocab), output, row);
      __syncthreads();
#pragma unroll 1
      for (int slot = begin + threadIdx.x % 32; slot < end; slot += 32)
        if (low + slot >= 0 && low + slot < p.vocab) slots[slot] = biased(p, slots[slot], low + slot, output);
      __syncwarp();
    }
  }
  const ClusterRow<T> source{slots, held, {whole}};
  run_row<T, Cluster, ClusterRow<T>, kWarps>(p, shared, source, marks, begin, end, whole.first, whole.last, output, row,
                                             random);
  cluster_sync();  // others may still read this block's sums
}

}  // namespace fi
