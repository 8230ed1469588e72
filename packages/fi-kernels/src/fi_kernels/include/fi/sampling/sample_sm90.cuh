// Samples one row per cluster on sm_90: the CTAs cache the row in shared memory and read it from global memory once.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/sampling/sample.cuh"
#include "fi/sampling/single_pass_sm90.cuh"
#include "fi/sampling/softmax_sm90.cuh"

namespace fi {
namespace sampling {

template <class T>
struct AsyncCachedRow : CachedRow<T> {
  Barrier& copied;
  FI_DEVICE void await() const { copied.wait(0); }
};

// Starts the bulk copies of the cached slots among [begin, end) of this warp. Threads copy the partial 16-byte vectors
// at the ends of the row, so nothing outside the row is read.
template <class T>
FI_DEVICE void load_slots(const CachedRow<T>& to, int begin, int end, Barrier& barrier) {
  constexpr int kVec = AlignedRow<T>::kVec;
  const AlignedRow<T>& row = to.slots;
  const bool first = threadIdx.x % 32 == 0;
  const auto clamp_to_vectors = [&](int slot, int low, int high) {
    // Clamped to [low, high] and to the last whole vector.
    return max(low, min(slot, min(high, row.last / kVec * kVec)));
  };
  const int low = (row.first + kVec - 1) / kVec * kVec;
  const int head_begin = clamp_to_vectors(max(begin, low), begin, to.gap_begin),
            head_end = max(head_begin, clamp_to_vectors(to.gap_begin, begin, to.gap_begin));
  const int tail_begin = clamp_to_vectors(max(to.gap_end, low), to.gap_end, end),
            tail_end = max(tail_begin, clamp_to_vectors(end, to.gap_end, end));
  if (first) {
    barrier.init(1);
    fence_barrier_init();
    barrier.arrive_expect((head_end - head_begin + tail_end - tail_begin) * sizeof(T));
    if (head_end > head_begin)
      bulk_load(to.cached(head_begin), row.base + head_begin, (head_end - head_begin) * sizeof(T), barrier,
                kEvictFirst);
    if (tail_end > tail_begin)
      bulk_load(to.cached(tail_begin), row.base + tail_begin, (tail_end - tail_begin) * sizeof(T), barrier,
                kEvictFirst);
    if (to.gap_end > to.gap_begin) bulk_prefetch(row.base + to.gap_begin, (to.gap_end - to.gap_begin) * sizeof(T));
  }
  to.fill(begin, head_begin);
  to.fill(head_end, to.gap_begin);
  to.fill(to.gap_end, tail_begin);
  to.fill(tail_end, end);
  __syncwarp();
}

// Prefetches this warp's slots of a row that a later cluster samples into L2.
template <class T>
FI_DEVICE void prefetch_slots(const SampleParams& p, int64_t output, int cta_first_slot, int begin, int end) {
  if (output >= p.rows || threadIdx.x % 32 != 0) return;
  const int64_t row = input_row(p, output);
  if (row < 0 || row >= p.input_rows || (p.single_pass && is_single_pass(p, row))) return;
  const AlignedRow<T> slots(static_cast<const T*>(p.input) + row * p.input_stride, p.vocab);
  constexpr int kVec = AlignedRow<T>::kVec;
  const int from = max(cta_first_slot + begin, (slots.first + kVec - 1) / kVec * kVec);
  const int until = min(cta_first_slot + end, slots.last / kVec * kVec);
  if (from < until) bulk_prefetch(slots.base + from, (until - from) * sizeof(T));
}

}  // namespace sampling

// Draws a token from one row per cluster, except single-pass rows, or rewrites the row. CTA r caches slots
// [r * p.cta_slots, (r + 1) * p.cta_slots).
template <class T, int kThreads, bool kDraws>
FI_DEVICE void sample_cluster(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  __shared__ SamplerShared<CtaCluster, kWarps> shared;
  __shared__ Barrier barriers[kWarps];
  const int warp = threadIdx.x / 32;
  T* slots = reinterpret_cast<T*>(warp_list(kWarps));
  clear(shared);
  if (!p.single_pass) pdl_wait();  // else the single-pass kernel, which launched this one, has waited
  const int output = blockIdx.x / cluster_size();
  const int64_t row = input_row(p, output);
  if (skip_undrawable(p, output, row)) return pdl_wait();  // all CTAs of the cluster return
  if (p.single_pass && is_single_pass(p, row)) return pdl_wait();
  AlignedRow<T> aligned(static_cast<const T*>(p.input) + row * p.input_stride, p.vocab);
  const int cta_first_slot = cluster_rank() * p.cta_slots;
  aligned.base += cta_first_slot, aligned.first -= cta_first_slot, aligned.last -= cta_first_slot;
  const int used = max(0, min(p.cta_slots, slots_per_warp(aligned.last, 1)));  // a multiple of the tile size
  const int begin = min(warp * p.warp_slots, used), end = min(begin + p.warp_slots, used);
  slots += warp * (p.warp_cached - p.warp_slots);
  AsyncCachedRow<T> source{{slots, end, end, aligned}, barriers[warp]};
  if (end - begin > p.warp_cached)
    source.gap_begin = begin + kTileSize, source.gap_end = end - p.warp_cached + kTileSize;
  load_slots<T>(source, begin, end, barriers[warp]);
  cluster_arrive();
  if (threadIdx.x == 0) shared.random = random_u64(row_random(p, output));  // overlaps with the copies
  if (p.prefetch_rows) {
    source.await();
    prefetch_slots<T>(p, int64_t{output} + p.prefetch_rows, cta_first_slot, begin, end);
  }
  if constexpr (sizeof(T) == 4) {
    if (has_adjustments(p)) {
      source.await();
      __syncthreads();
      const int low = -aligned.first;  // the token of slot 0
      apply_penalties(p, slots - min(low, 0), max(low, 0), min(low + used, p.vocab), output, row);
      __syncthreads();
#pragma unroll 1
      for (int slot = begin + threadIdx.x % 32; slot < end; slot += 32)
        if (low + slot >= 0 && low + slot < p.vocab) slots[slot] = biased_logit(p, slots[slot], low + slot, output);
      __syncwarp();
    }
  }
  sample_row<T, CtaCluster, AsyncCachedRow<T>, kWarps>(p, shared, source, warp_list(warp), begin, end, aligned.first,
                                                       aligned.last, output, static_cast<int>(row), kDraws);
  CtaCluster::sync();  // other CTAs may still read this CTA's shared memory
  pdl_wait();
}

}  // namespace fi
