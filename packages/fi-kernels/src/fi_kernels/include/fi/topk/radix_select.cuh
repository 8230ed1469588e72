// Selects by radix passes with one CTA or cluster: order-preserving keys, and the digit that contains a given rank.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/topk/top_k.h"

namespace fi {

// Maps elements to keys in the order that top_k.h states: every NaN has the largest key, both zeros have the same. The
// map is exact for 16-bit types too.
FI_DEVICE uint32_t key_of(float x) { return ordered(__float_as_uint(canonical(x))); }
FI_DEVICE float value_of(uint32_t key) { return __uint_as_float(unordered(key)); }

// What the radix passes have established about the k-th largest key: its bits from `shift` on equal those of `lower`,
// and it is the `rank`-th largest of the `count` keys that share them.
struct KeyRange {
  uint32_t lower;
  int shift;  // 32 before the first pass
  uint32_t rank, count;

  FI_DEVICE bool contains(uint32_t key) const { return shift == 32 || (key ^ lower) >> shift == 0; }
  FI_DEVICE int next_shift() const { return shift == 32 ? 20 : shift - 10; }
  FI_DEVICE uint32_t digit(uint32_t key) const { return (key >> next_shift()) & ((1u << (shift - next_shift())) - 1); }
  // The range after the pass whose bin find_bin has found.
  FI_DEVICE KeyRange narrowed(const TopKShared& shared) const {
    return {lower | shared.bin << next_shift(), next_shift(), rank - shared.above, shared.in_bin};
  }
  // Once settled, the range selects all keys above `bound()`, and `ties()` of those equal to it.
  FI_DEVICE bool all() const { return rank == count; }
  FI_DEVICE bool settled() const { return all() || shift == 0; }
  FI_DEVICE uint32_t bound() const { return all() ? lower - 1 : lower; }
  FI_DEVICE uint32_t ties() const { return all() ? 0 : rank; }
};

template <class N>
FI_DEVICE N warp_scan(N x) {  // inclusive
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const N other = __shfl_up_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 >= step) x += other;
  }
  return x;
}

template <int kThreads, int kBins>
FI_DEVICE void clear(uint32_t* bins) {
  for (int i = threadIdx.x * 4; i < kBins; i += kThreads * 4) *reinterpret_cast<uint4*>(bins + i) = uint4{};
}

// Finds the bin that contains the `rank`-th largest element: sets shared.bin, the number of elements in higher bins
// (above) and in the bin (in_bin). Executes two barriers, one of them last.
template <int kThreads, int kBins>
FI_DEVICE void find_bin(const uint32_t* bins, uint32_t rank, TopKShared& shared) {
  constexpr int kEach = kBins / kThreads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = kBins - kEach * (threadIdx.x + 1);
  constexpr int kWide = kEach < 4 ? kEach : 4;  // words per load
  Vec<uint32_t, kWide> count[kEach / kWide];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i % kWide == 0) count[i / kWide] = load<uint32_t, kWide>(bins + first + i);
    sum += count[i / kWide].v[i % kWide];
  }
  const uint32_t up_to = warp_scan(sum);  // this thread's bins and those above, within the warp
  if (lane == 31) shared.warp_sums[warp] = up_to;
  __syncthreads();
  const uint32_t warps = warp_scan(lane < kThreads / 32 ? shared.warp_sums[lane] : 0);
  const uint32_t warps_above = __shfl_sync(0xffffffffu, warps, max(warp - 1, 0));
  uint32_t above = (warp > 0 ? warps_above : 0) + up_to - sum;
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

// Runs radix passes over key(0) to key(n - 1) until the range is settled.
template <int kThreads, class Key>
FI_DEVICE KeyRange select_key(KeyRange range, int n, Key key, TopKShared& shared) {
#pragma unroll 1
  while (!range.settled()) {
    clear<kThreads, kTopKBins>(shared.digits);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += kThreads)
      if (range.contains(key(i))) atomicAdd(&shared.digits[range.digit(key(i))], 1u);
    __syncthreads();
    find_bin<kThreads, kTopKBins>(shared.digits, range.rank, shared);
    range = range.narrowed(shared);
  }
  return range;
}

// Sums x over the threads before this one and over the CTA. Executes two barriers, one of them first.
struct CtaScan {
  uint64_t before, all;
};
template <int kThreads>
FI_DEVICE CtaScan cta_scan(uint64_t x, TopKShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t up_to = warp_scan(x);
  __syncthreads();
  if (lane == 31) shared.warp_counts[warp] = up_to;
  __syncthreads();
  const uint64_t warps = warp_scan(lane < kThreads / 32 ? shared.warp_counts[lane] : 0);
  const uint64_t before = __shfl_sync(0xffffffffu, warps, max(warp - 1, 0));
  return {(warp > 0 ? before : 0) + up_to - x, __shfl_sync(0xffffffffu, warps, 31)};
}

// Visits items 0 to n - 1 in order, in one contiguous range per warp. `sum` adds up the counts of the items; `visit`
// then passes each item the sum of the counts before it.
template <int kThreads>
struct OrderedScan {
  int first, last;

  FI_DEVICE explicit OrderedScan(int n) {
    const int run = (n + kThreads - 1) / kThreads * 32;
    first = min(static_cast<int>(threadIdx.x) / 32 * run, n);
    last = min(first + run, n);
  }
  template <class Count>
  FI_DEVICE CtaScan sum(Count count, TopKShared& shared) const {
    uint64_t mine = 0;
#pragma unroll 1
    for (int i = first + static_cast<int>(threadIdx.x) % 32; i < last; i += 32) mine += count(i);
    CtaScan sum = cta_scan<kThreads>(mine, shared);
    sum.before = __shfl_sync(0xffffffffu, sum.before, 0);  // of the warp's range
    return sum;
  }
  template <class Count, class Visit>
  FI_DEVICE void visit(uint64_t before, Count count, Visit visit) const {
#pragma unroll 1
    for (int i = first; i < last; i += 32) {
      const int mine = i + static_cast<int>(threadIdx.x) % 32;
      // Within a warp, each half of a count fits into 16 bits.
      const uint64_t n = mine < last ? count(mine) : 0;
      const uint32_t packed = static_cast<uint32_t>(n | n >> 16), up_to = warp_scan(packed);
      if (n) visit(mine, before + spread(up_to - packed));
      before += spread(__shfl_sync(0xffffffffu, up_to, 31));
    }
  }
  FI_DEVICE static uint64_t spread(uint32_t packed) {
    return static_cast<uint64_t>(packed >> 16) << 32 | (packed & 0xffff);
  }
};

// Sorts m items (a power of two, 4 or more) in shared memory in descending order, by Batcher's bitonic network. Two
// strides at a time pass through registers, four items per thread; short strides stay within a warp.
// Item i is in slot sort_slot(i), which avoids bank conflicts at short strides.
FI_DEVICE int sort_slot(int i) { return i ^ ((i >> 4) & 15); }
FI_DEVICE void order(uint64_t& a, uint64_t& b, bool descending) {
  const bool swap = (a < b) == descending;
  const uint64_t low = swap ? b : a;
  b = swap ? a : b;
  a = low;
}
template <int kThreads>
FI_DEVICE void sort_descending(uint64_t* items, int m) {
  const int quads = max(m / 4 / (kThreads / 32), 1);  // per warp, which owns 4 * quads items
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * quads, last = min(first + quads, m / 4);
#pragma unroll 1
  for (int size = 2; size <= m; size *= 2) {
#pragma unroll 1
    for (int stride = size / 2; stride > 0;) {
      // Processes `stride` and half of it. If the number of strides is odd, the last one is alone, with two pairs per
      // thread.
      const bool both = stride > 1;
      const int near = both ? stride / 2 : 1, far = both ? stride : 2;
#pragma unroll 1
      for (int i = first + lane; i < last; i += 32) {
        const int at = (i & ~(near - 1)) * 4 + (i & (near - 1));
        uint64_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = items[sort_slot(at + j * near)];
        if (both) {
          order(x[0], x[2], (at & size) == 0);
          order(x[1], x[3], (at & size) == 0);
        }
        order(x[0], x[1], (at & size) == 0);
        order(x[2], x[3], ((at + 2 * near) & size) == 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) items[sort_slot(at + j * near)] = x[j];
      }
      stride = both ? stride / 4 : 0;
      const int next = stride > 0 ? stride : size;
      if (max(far, next) > quads * 2)
        __syncthreads();
      else
        __syncwarp();
    }
  }
}

}  // namespace fi
