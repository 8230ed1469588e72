// Packs bytes into bits: one aligned segment with 16-byte loads, or any segments with one output byte per thread.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/find_segment.h"
#include "fi/quantization/packbits.h"

namespace fi {
namespace packbits_detail {

// Loads min(count, 8) elements of x, one per byte; the remaining bytes are zero.
FI_DEVICE uint64_t load_partial(const uint8_t* x, int64_t count) {
  uint64_t word = 0;
#pragma unroll 1
  for (int i = 0; i < 8 && i < count; ++i) word |= static_cast<uint64_t>(x[i] != 0) << (8 * i);
  return word;
}

}  // namespace packbits_detail

// One segment; x is aligned to 16 bytes, y to 2. Each thread packs kNumVecs vectors of 16 elements, blockDim.x apart.
template <int kNumVecs>
FI_DEVICE void packbits_vectors(const PackbitsParams& p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * kNumVecs + threadIdx.x;
  Vec<uint64_t, 2> x[kNumVecs];
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kNumVecs; ++i) {
    const int64_t at = (first + i * blockDim.x) * 16;
    if (at + 16 <= p.elements) x[i] = load<uint64_t, 2>(reinterpret_cast<const uint64_t*>(p.x + at));
  }
  pdl_launch_dependents();
#pragma unroll
  for (int i = 0; i < kNumVecs; ++i) {
    const int64_t at = (first + i * blockDim.x) * 16;
    if (at + 16 > p.elements) continue;
    const uint16_t low = pack(x[i].v[0], p.big_endian), high = pack(x[i].v[1], p.big_endian);
    *reinterpret_cast<uint16_t*>(p.y + at / 8) = low | high << 8;
  }
  if (first == 0)  // one thread packs the tail that is shorter than a vector
    for (int64_t at = p.elements / 16 * 16; at < p.elements; at += 8)
      p.y[at / 8] = pack(packbits_detail::load_partial(p.x + at, p.elements - at), p.big_endian);
}

// Any segments, any alignment: one output byte per thread. A thread reads its 8 elements as aligned 8-byte words where
// these words are inside the segment, else byte by byte.
FI_DEVICE void packbits_bytes(const PackbitsParams& p) {
  const int64_t out = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  pdl_wait();
  pdl_launch_dependents();
  if (out >= p.bytes) return;
  int64_t begin = 0, end = p.elements, first = 0;
  if (p.indptr) {
    const int32_t segment = find_segment(p.new_indptr, p.segments, out);
    begin = indptr_at(p, segment);
    end = indptr_at(p, segment + 1);
    first = p.new_indptr[segment];
  }
  const uint8_t* x = p.x + begin + (out - first) * 8;
  const uint64_t low = reinterpret_cast<uint64_t>(x) & 7;
  const uint8_t* word = x - low;
  uint64_t eight;
  if (word >= p.x + begin && word + (low ? 16 : 8) <= p.x + end) {
    eight = *reinterpret_cast<const uint64_t*>(word) >> (8 * low);
    if (low) eight |= *reinterpret_cast<const uint64_t*>(word + 8) << (64 - 8 * low);
  } else {
    eight = packbits_detail::load_partial(x, p.x + end - x);
  }
  p.y[out] = pack(eight, p.big_endian);
}

}  // namespace fi
