// Parameters of the packbits kernels, and the packing of eight elements that both devices share.
#pragma once
#include "fi/types.h"

namespace fi {

// x: bytes of which the non-zero ones are set; y: their bits. With an indptr each segment starts at a byte of its own.
struct PackbitsParams {
  const uint8_t* x;
  uint8_t* y;
  const void* indptr;         // [segments + 1] in elements of x; null: one segment of `elements`
  const int32_t* new_indptr;  // [segments + 1] in bytes of y
  int64_t elements, bytes;    // of x and y
  int32_t segments;
  int32_t wide;  // whether indptr is int64, else int32
  int32_t big;   // whether the first element is the highest bit, else the lowest
};

FI_HOST_DEVICE int64_t element_at(const PackbitsParams& p, int32_t segment) {
  return p.wide ? static_cast<const int64_t*>(p.indptr)[segment] : static_cast<const int32_t*>(p.indptr)[segment];
}

// Eight elements, the first in the lowest byte, to bits. The multiplication adds up shifted copies, of which no two set
// bits meet, so that the wanted order stands in the highest byte.
FI_HOST_DEVICE uint8_t pack(uint64_t x, bool big) {
  const uint64_t low = 0x7f7f7f7f7f7f7f7full;
  const uint64_t set = (((x & low) + low) | x) >> 7 & 0x0101010101010101ull;
  return static_cast<uint8_t>((set * (big ? 0x8040201008040201ull : 0x0102040810204080ull)) >> 56);
}

}  // namespace fi
