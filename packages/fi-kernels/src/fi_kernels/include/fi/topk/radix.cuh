// Radix selection by one block or cluster: order-preserving keys, and the digit in which the wanted rank falls.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/topk/top_k.h"

namespace fi {

// Keys of the order that top_k.h states: all NaN have the largest, both zeros the same. Exact for 16-bit types too.
FI_DEVICE uint32_t key_of(float x) { return ordered(__float_as_uint(canonical(x))); }
FI_DEVICE float value_of(uint32_t key) { return __uint_as_float(unordered(key)); }

// Where the k-th largest key is known to lie: its bits from `shift` on are those of `lower`, and it is number `rank`
// from the top among the keys that share them.
struct KeyRange {
  uint32_t lower;
  int shift;  // 32: nothing is known
  uint32_t rank;

  FI_DEVICE bool contains(uint32_t key) const { return shift == 32 || (key ^ lower) >> shift == 0; }
  FI_DEVICE int next_shift() const { return shift == 32 ? 20 : shift - 10; }
  FI_DEVICE uint32_t digit(uint32_t key) const { return (key >> next_shift()) & ((1u << (shift - next_shift())) - 1); }
  // The range of the next digit.
  FI_DEVICE KeyRange narrowed(const TopKShared& shared) const {
    return {lower | shared.bin << next_shift(), next_shift(), rank - shared.above};
  }
};

template <int kThreads, int kBins>
FI_DEVICE void clear(uint32_t* bins) {
  for (int i = threadIdx.x * 4; i < kBins; i += kThreads * 4) *reinterpret_cast<uint4*>(bins + i) = uint4{};
}

// The bin that holds element number `rank` from the top, how many lie in higher bins, and in it: shared.bin, above and
// in_bin. Two barriers, one of them last.
template <int kThreads, int kBins>
FI_DEVICE void find_bin(const uint32_t* bins, uint32_t rank, TopKShared& shared) {
  constexpr int kEach = kBins / kThreads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = kBins - kEach * (threadIdx.x + 1);
  constexpr int kWide = kEach < 4 ? kEach : 4;  // words a load
  Vec<uint32_t, kWide> count[kEach / kWide];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i % kWide == 0) count[i / kWide] = load<uint32_t, kWide>(bins + first + i);
    sum += count[i / kWide].v[i % kWide];
  }
  uint32_t up_to = sum;  // this thread's bins and those above
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) shared.warp_sums[warp] = up_to;
  __syncthreads();
  uint32_t above = up_to - sum;
#pragma unroll 8
  for (int i = 0; i < warp; ++i) above += shared.warp_sums[i];
  if (above < rank && rank <= above + sum) {
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      const uint32_t here = count[i / kWide].v[i % kWide];
      if (above < rank && rank <= above + here) {
        shared.bin = first + i;
        shared.above = above;
        shared.in_bin = here;
      }
      above += here;
    }
  }
  __syncthreads();
}

// The exact key of rank range.rank among the n keys of the list: range.shift is 0 afterwards. Overwrites shared.total.
template <int kThreads>
FI_DEVICE KeyRange select_in_list(KeyRange range, uint32_t n, TopKShared& shared) {
  while (range.shift > 0) {
    clear<kThreads, kTopKBins>(shared.total);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
      const uint32_t key = shared.list[i];
      if (range.contains(key)) atomicAdd(&shared.total[range.digit(key)], 1u);
    }
    __syncthreads();
    find_bin<kThreads, kTopKBins>(shared.total, range.rank, shared);
    range = range.narrowed(shared);
  }
  return range;
}

// Sums of x over the threads before this one, and over the block. One barrier; the next call needs one in between.
struct BlockSum {
  uint64_t before, all;
};
template <int kThreads>
FI_DEVICE BlockSum block_scan(uint64_t x, TopKShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t up_to = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) shared.warp_counts[warp] = up_to;
  __syncthreads();
  BlockSum sum{up_to - x, 0};
#pragma unroll 8
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) sum.before += shared.warp_counts[i];
    sum.all += shared.warp_counts[i];
  }
  return sum;
}

// Sorts m items (a power of two) in shared memory from the largest down: Batcher's bitonic network, whose short strides
// stay within a warp.
template <int kThreads>
FI_DEVICE void sort_descending(uint64_t* items, int m) {
  const int pairs = max(m / 2 / (kThreads / 32), 1);  // of a warp; 2 * pairs items are its own
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * pairs;
  for (int size = 2; size <= m; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = first + lane; i < min(first + pairs, m / 2); i += 32) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const uint64_t a = items[low], b = items[high];
        if ((a < b) == ((low & size) == 0)) {
          items[low] = b;
          items[high] = a;
        }
      }
      const int next = stride > 1 ? stride / 2 : size;
      if (max(stride, next) > pairs)
        __syncthreads();
      else
        __syncwarp();
    }
  }
}

}  // namespace fi
