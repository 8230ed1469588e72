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
  FI_DEVICE static void appear() {}
  FI_DEVICE static void meet() {}
  FI_DEVICE static void sync() { __syncthreads(); }
  FI_DEVICE static uint4 read(const Counter& x, unsigned) { return *reinterpret_cast<const uint4*>(&x); }
  FI_DEVICE static uint32_t read(const uint32_t& x, unsigned) { return x; }
  FI_DEVICE static void write(uint32_t& to, unsigned, uint32_t x) { to = x; }
  FI_DEVICE static void write(uint64_t& to, unsigned, uint64_t x) { to = x; }
  struct Gathering {
    FI_DEVICE void begin(unsigned) {}
    FI_DEVICE void give(PieceSum& to, unsigned, uint4 x) { *reinterpret_cast<uint4*>(&to) = x; }
    FI_DEVICE void await() { __syncthreads(); }
  };
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

// The smallest key that is near enough below the quantile-th largest, by bisection: there are as many and few more from
// it on. count(key) is how many there are from a key on, at least `quantile` from `low`.
template <class Count>
FI_DEVICE uint32_t quantile_of(int quantile, uint32_t low, uint32_t high, Count&& count) {
  const uint32_t width = max((high - low) >> 14, 1u);  // of keys, below which there are few
#pragma unroll 1
  while (high - low >= width) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int found = count(middle);
    if (found < quantile)
      high = middle - 1;
    else
      low = middle;
    if (found >= quantile && found <= quantile + quantile / 8) break;
  }
  return low;
}

// Keys, both inside; none if low > high.
struct Range {
  uint32_t low, high;
};

}  // namespace sampling
}  // namespace fi
