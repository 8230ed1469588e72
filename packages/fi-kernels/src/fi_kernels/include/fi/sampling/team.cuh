// Blocks that work on a row together: what they share, and how they add it up.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/sampling/piece.h"

namespace fi {
namespace sampling {

constexpr int kPeaks = 8;
constexpr int kBuckets = 128;
constexpr int kAbove = kBuckets, kAll = kBuckets + 1, kCounters = kBuckets + 2;
constexpr int kSteps = 256;             // sixteenths of a power of two by which a sample is sorted
constexpr int kListed = kListRoom / 4;  // marked elements that a warp has room for
constexpr int kFew = 192;               // elements among which each is compared with all others

// Number of elements and sum of weights of a bucket, in parts: there is no 64-bit adder in shared memory. The sum is
// low + high * 2^kHighAt.
struct alignas(16) Counter {
  uint32_t count, low, high, unused;
};
struct alignas(16) Total {
  uint64_t sum;
  uint32_t count, before;  // elements in all blocks, in those before this one
};

// A block alone. A team writes to and reads from the shared memory of its blocks, in order of its syncs.
struct OneBlock {
  static constexpr unsigned kLargest = 1;
  FI_DEVICE static unsigned rank() { return 0; }
  FI_DEVICE static unsigned size() { return 1; }
  FI_DEVICE static void arrive() {}
  FI_DEVICE static void meet() {}
  FI_DEVICE static void sync() { __syncthreads(); }
  FI_DEVICE static uint4 read(const Counter& x, unsigned) { return *reinterpret_cast<const uint4*>(&x); }
  FI_DEVICE static uint32_t read(const uint32_t& x, unsigned) { return x; }
  FI_DEVICE static void write(uint32_t& to, unsigned, uint32_t x) { to = x; }
  FI_DEVICE static void write(uint64_t& to, unsigned, uint64_t x) { to = x; }
  // To the first block, which alone goes on when all have given.
  FI_DEVICE static void give(PieceSum& to, uint4 x) { *reinterpret_cast<uint4*>(&to) = x; }
  FI_DEVICE static bool gathered() {
    __syncthreads();
    return true;
  }
  // Any number of elements in a bucket: the carry of the lower word goes to the upper.
  static constexpr int kHighAt = 32;
  FI_DEVICE static void add(Counter& to, uint32_t weight) {
    atomicAdd(&to.count, 1u);
    if (weight && atomicAdd(&to.low, weight) > ~weight) atomicAdd(&to.high, 1u);
  }
};

FI_DEVICE uint32_t key_of(float x) { return ordered(__float_as_uint(x + 0.f)); }  // -0 becomes +0
FI_DEVICE float value_of(uint32_t key) { return __uint_as_float(unordered(key)); }

// Of numbers below 2^54.
FI_DEVICE uint64_t warp_sum_u64(uint64_t x) {
  constexpr uint32_t part = (1u << 27) - 1;
  const uint32_t low = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(x) & part);
  return (uint64_t{__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(x >> 27))} << 27) + low;
}
template <class T>
FI_DEVICE T warp_scan(T x) {  // inclusive
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, x, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) x += other;
  }
  return x;
}

// By one warp: the quantile-th largest of n keys or a little less, 0 if fewer are not 0; key(i) is the i-th.
template <class Key>
FI_DEVICE uint32_t quantile_of(int quantile, int n, Key&& key) {
  uint32_t high = 0, low = ~0u, there = 0;  // of those that are not zero
  for (int i = threadIdx.x % 32; i < n; i += 32) {
    const uint32_t own = key(i);
    high = max(high, own);
    low = min(low, own - 1);
    there += own != 0;
  }
  if (static_cast<int>(__reduce_add_sync(0xffffffffu, there)) < quantile) return 0;
  high = __reduce_max_sync(0xffffffffu, high);
  low = __reduce_min_sync(0xffffffffu, low) + 1;
  int bit = 31 - __clz(static_cast<int>(high ^ low));  // the highest in which they differ
  uint32_t found = bit < 0 ? high : high >> bit >> 1 << bit << 1;
#pragma unroll 1
  for (const int last = max(bit - 9, 0); bit >= last; --bit) {  // finer would leave out few elements more
    const uint32_t trial = found | 1u << bit;
    uint32_t count = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) count += key(i) >= trial;
    if (static_cast<int>(__reduce_add_sync(0xffffffffu, count)) >= quantile) found = trial;
  }
  return found;
}

// Keys, both inside; none if low > high.
struct Range {
  uint32_t low, high;
};

}  // namespace sampling
}  // namespace fi
