// Defines how the CTAs of a cluster exchange data while they sample a row, here for a cluster of one CTA.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/sampling/tile.h"

namespace fi {
namespace sampling {

constexpr int kTileGroups = 8;
constexpr int kBuckets = 128;
constexpr int kAboveCounter = kBuckets, kAllCounter = kBuckets + 1, kCounters = kBuckets + 2;
constexpr int kSampleBins = 256;                       // a bin spans a sixteenth of a power of two in probability
constexpr int kWarpListCapacity = kWarpListBytes / 4;  // candidates of a warp
constexpr int kMaxCandidates = 192;                    // candidates that are compared pairwise

// The number and weight of the elements of a histogram bucket. Shared memory has no 64-bit adder, so the weight is low
// + high * 2^kHighShift.
struct alignas(16) BucketCounter {
  uint32_t count, low, high, unused;
};
struct alignas(16) BucketTotal {
  uint64_t sum;
  uint32_t count, before;  // elements in all CTAs, in the CTAs of lower rank
};

// A cluster of one CTA. Code for clusters writes to and reads from the shared memory of its CTAs, ordered by `sync`.
struct SingleCta {
  static constexpr unsigned kMaxCtas = 1;
  FI_DEVICE static unsigned rank() { return 0; }
  FI_DEVICE static unsigned size() { return 1; }
  FI_DEVICE static void arrive_relaxed() {}
  FI_DEVICE static void wait() {}
  FI_DEVICE static void sync() { __syncthreads(); }
  FI_DEVICE static uint4 read(const BucketCounter& x, unsigned) { return *reinterpret_cast<const uint4*>(&x); }
  FI_DEVICE static uint32_t read(const uint32_t& x, unsigned) { return x; }
  FI_DEVICE static void write(uint32_t& to, unsigned, uint32_t x) { to = x; }
  FI_DEVICE static void write(uint64_t& to, unsigned, uint64_t x) { to = x; }
  struct TransactionBarrier {
    FI_DEVICE void init() {}
    FI_DEVICE void expect(unsigned) {}
    FI_DEVICE void send(TileSum& to, unsigned, uint4 x) { *reinterpret_cast<uint4*>(&to) = x; }
    FI_DEVICE void wait() { __syncthreads(); }
  };
  // A bucket may hold any number of elements: the low word carries into the high word.
  static constexpr int kHighShift = 32;
  FI_DEVICE static void add(BucketCounter& to, uint32_t weight) {
    atomicAdd(&to.count, 1u);
    if (weight && atomicAdd(&to.low, weight) > ~weight) atomicAdd(&to.high, 1u);
  }
};

FI_DEVICE uint32_t key_of(float x) { return ordered(__float_as_uint(x + 0.f)); }  // -0 becomes +0
FI_DEVICE float value_of(uint32_t key) { return __uint_as_float(unordered(key)); }

// Sums over the warp. Each x must be below 2^54.
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

// Returns a key a little below or at the n-th largest, by bisection: at least n keys and few more are at or above it.
// `count(key)` returns the number of keys from `key` on; at least n are from `low` on.
template <class Count>
FI_DEVICE uint32_t kth_largest_lower_bound(int n, uint32_t low, uint32_t high, Count&& count) {
  const uint32_t width = max((high - low) >> 14, 1u);  // a key interval this narrow holds few keys
#pragma unroll 1
  while (high - low >= width) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int found = count(middle);
    if (found < n)
      high = middle - 1;
    else
      low = middle;
    if (found >= n && found <= n + n / 8) break;
  }
  return low;
}

// An inclusive range of keys; empty if low > high.
struct KeyRange {
  uint32_t low, high;
};

}  // namespace sampling
}  // namespace fi
