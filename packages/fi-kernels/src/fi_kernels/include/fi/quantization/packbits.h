// Parameters of the packbits kernels, and the packing of eight elements that the CPU and CUDA kernels share.
#pragma once
#include "fi/types.h"

namespace fi {

// Packs 8 elements of x into a byte of y; a non-zero element is a set bit. With an indptr, each segment starts at a new
// byte of y.
struct PackbitsParams {
  const uint8_t* x;
  uint8_t* y;
  const void* indptr;         // [segments + 1], offsets into x; null: one segment
  const int32_t* new_indptr;  // [segments + 1], offsets into y
  int64_t elements, bytes;    // lengths of x and y
  int32_t segments;
  int32_t indptr_is_int64;  // 1: indptr is int64; 0: int32
  int32_t big_endian;       // 1: the first element is the highest bit of its byte; 0: the lowest
};

FI_HOST_DEVICE int64_t indptr_at(const PackbitsParams& p, int32_t segment) {
  return p.indptr_is_int64 ? static_cast<const int64_t*>(p.indptr)[segment]
                           : static_cast<const int32_t*>(p.indptr)[segment];
}

// Packs eight elements, the first in the lowest byte of x. The multiplication adds shifted copies whose set bits do not
// overlap, so the highest byte holds the bits in the requested order.
FI_HOST_DEVICE uint8_t pack(uint64_t x, bool big_endian) {
  const uint64_t low = 0x7f7f7f7f7f7f7f7full;
  const uint64_t set = (((x & low) + low) | x) >> 7 & 0x0101010101010101ull;
  return static_cast<uint8_t>((set * (big_endian ? 0x8040201008040201ull : 0x0102040810204080ull)) >> 56);
}

}  // namespace fi
