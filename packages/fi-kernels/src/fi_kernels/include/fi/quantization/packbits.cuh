// Packs bytes to bits: one segment by 16-byte loads, or any segments from any address a byte of output a thread.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/quantization/packbits.h"
#include "fi/segments.h"

namespace fi {
namespace packbits_detail {

// Up to eight elements from x on, the rest zero.
FI_DEVICE uint64_t gather(const uint8_t* x, int64_t count) {
  uint64_t word = 0;
#pragma unroll 1
  for (int i = 0; i < 8 && i < count; ++i) word |= static_cast<uint64_t>(x[i] != 0) << (8 * i);
  return word;
}

}  // namespace packbits_detail

// One segment; x is aligned to 16 bytes, y to 2. kCount vectors a thread, a block's width apart.
template <int kCount>
FI_DEVICE void packbits_vectors(const PackbitsParams& p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * kCount + threadIdx.x;
  Vec<uint64_t, 2> x[kCount];
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t at = (first + i * blockDim.x) * 16;
    if (at + 16 <= p.elements) x[i] = load<uint64_t, 2>(reinterpret_cast<const uint64_t*>(p.x + at));
  }
  pdl_launch_dependents();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t at = (first + i * blockDim.x) * 16;
    if (at + 16 > p.elements) continue;
    const uint16_t low = pack(x[i].v[0], p.big), high = pack(x[i].v[1], p.big);
    *reinterpret_cast<uint16_t*>(p.y + at / 8) = low | high << 8;
  }
  if (first == 0)  // what is less than a vector
    for (int64_t at = p.elements / 16 * 16; at < p.elements; at += 8)
      p.y[at / 8] = pack(packbits_detail::gather(p.x + at, p.elements - at), p.big);
}

// Any segments, any alignment. Words are read whole where they lie inside the segment.
FI_DEVICE void packbits_bytes(const PackbitsParams& p) {
  const int64_t out = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  pdl_wait();
  pdl_launch_dependents();
  if (out >= p.bytes) return;
  int64_t begin = 0, end = p.elements, first = 0;
  if (p.indptr) {
    const int32_t segment = segment_of(p.new_indptr, p.segments, out);
    begin = element_at(p, segment);
    end = element_at(p, segment + 1);
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
    eight = packbits_detail::gather(x, p.x + end - x);
  }
  p.y[out] = pack(eight, p.big);
}

}  // namespace fi
