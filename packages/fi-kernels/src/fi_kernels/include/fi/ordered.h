// Maps floating-point numbers to unsigned integers of the same order, for radix selection on the CPU and on CUDA.
#pragma once
#include "fi/types.h"

namespace fi {

// Takes the bits of a number of the word's width (fp32 in 32 bits; fp16 and bf16 in 16). For numbers a and b, a < b
// holds if and only if ordered(a) < ordered(b), with two additions: -0 is less than +0, and a NaN is beyond the
// infinity of its sign.
FI_HOST_DEVICE uint32_t ordered(uint32_t bits) { return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u); }
FI_HOST_DEVICE uint16_t ordered(uint16_t bits) {
  return static_cast<uint16_t>(bits ^ (bits >> 15 ? 0xffffu : 0x8000u));
}
// The inverse of ordered(): the bits of the number.
FI_HOST_DEVICE uint32_t unordered(uint32_t key) { return key ^ (key >> 31 ? 0x80000000u : 0xffffffffu); }
FI_HOST_DEVICE uint16_t unordered(uint16_t key) { return static_cast<uint16_t>(key ^ (key >> 15 ? 0x8000u : 0xffffu)); }

}  // namespace fi
