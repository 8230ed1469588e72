// sample on sm_90: a row lies in the shared memory of a cluster of blocks, and is read from global memory once.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/sampling/sample.cuh"
#include "fi/sampling/softmax_sm90.cuh"
#include "fi/sampling/stream_sm90.cuh"

namespace fi {
namespace sampling {

template <class T>
struct CopiedRow : PlacedRow<T> {
  Barrier& copied;
  FI_DEVICE void await() const { copied.wait(0); }
};

// Starts to fill what is held of the slots [begin, end) of this warp. What the row does not fill to 16 bytes at its
// ends is copied by hand, so nothing outside of it is read.
template <class T>
FI_DEVICE void load_slots(const PlacedRow<T>& to, int begin, int end, Barrier& barrier) {
  constexpr int kVec = Slots<T>::kVec;
  const Slots<T>& row = to.slots;
  const bool first = threadIdx.x % 32 == 0;
  const auto whole = [&](int slot, int low, int high) {
    return max(low, min(slot, min(high, row.last / kVec * kVec)));  // at most, and no whole vector further on
  };
  const int low = (row.first + kVec - 1) / kVec * kVec;
  const int from = whole(max(begin, low), begin, to.gap_begin),
            until = max(from, whole(to.gap_begin, begin, to.gap_begin));
  const int after = whole(max(to.gap_end, low), to.gap_end, end), over = max(after, whole(end, to.gap_end, end));
  if (first) {
    barrier.init(1);
    fence_barrier_init();
    barrier.arrive_expect((until - from + over - after) * sizeof(T));
    if (until > from) bulk_load(to.held(from), row.base + from, (until - from) * sizeof(T), barrier, kEvictFirst);
    if (over > after) bulk_load(to.held(after), row.base + after, (over - after) * sizeof(T), barrier, kEvictFirst);
    if (to.gap_end > to.gap_begin) bulk_prefetch(row.base + to.gap_begin, (to.gap_end - to.gap_begin) * sizeof(T));
  }
  to.fill(begin, from);
  to.fill(until, to.gap_begin);
  to.fill(to.gap_end, after);
  to.fill(over, end);
  __syncwarp();
}

// Brings this warp's slots of a row that a later cluster will work on to L2, while this one computes.
template <class T>
FI_DEVICE void prefetch_slots(const SampleParams& p, int64_t output, int skipped, int begin, int end) {
  if (output >= p.rows || threadIdx.x % 32 != 0) return;
  const int64_t row = source_row(p, output);
  if (row < 0 || row >= p.input_rows || (p.streamed && is_streamed(p, row))) return;
  const Slots<T> slots(static_cast<const T*>(p.input) + row * p.input_row, p.vocab);
  constexpr int kVec = Slots<T>::kVec;
  const int from = max(skipped + begin, (slots.first + kVec - 1) / kVec * kVec);
  const int until = min(skipped + end, slots.last / kVec * kVec);
  if (from < until) bulk_prefetch(slots.base + from, (until - from) * sizeof(T));
}

}  // namespace sampling

// One cluster a row, but for rows that are streamed: block r holds slots [r * p.slice, (r + 1) * p.slice).
template <class T, int kThreads>
FI_DEVICE void sample_cluster(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  __shared__ Scratch<Cluster, kWarps> shared;
  __shared__ Barrier barriers[kWarps];
  const int warp = threadIdx.x / 32;
  T* slots = reinterpret_cast<T*>(list_of(kWarps));
  clear(shared);
  if (!p.streamed) pdl_wait();  // else this one was launched by a kernel that had waited
  const int output = blockIdx.x / cluster_size();
  const int64_t row = source_row(p, output);
  if (missing(p, output, row)) return pdl_wait();  // all blocks of the cluster
  if (p.streamed && is_streamed(p, row)) return pdl_wait();
  Slots<T> whole(static_cast<const T*>(p.input) + row * p.input_row, p.vocab);
  const int skipped = cluster_rank() * p.slice;
  whole.base += skipped, whole.first -= skipped, whole.last -= skipped;
  const int used = max(0, min(p.slice, warp_share(whole.last, 1)));  // whole pieces
  const int begin = min(warp * p.share, used), end = min(begin + p.share, used);
  slots += warp * (p.held - p.share);
  CopiedRow<T> source{{slots, end, end, whole}, barriers[warp]};
  if (end - begin > p.held) source.gap_begin = begin + kPiece, source.gap_end = end - p.held + kPiece;
  load_slots<T>(source, begin, end, barriers[warp]);
  cluster_arrive();
  if (threadIdx.x == 0) shared.random = random_of(row_random(p, output));  // while the row is on its way
  if (p.ahead) {
    source.await();
    prefetch_slots<T>(p, int64_t{output} + p.ahead, skipped, begin, end);
  }
  if constexpr (sizeof(T) == 4) {
    if (is_adjusted(p)) {
      source.await();
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
  run_row<T, Cluster, CopiedRow<T>, kWarps>(p, shared, source, list_of(warp), begin, end, whole.first, whole.last,
                                            output, static_cast<int>(row));
  Cluster::sync();  // others may still read this block's sums
  pdl_wait();
}

}  // namespace fi
