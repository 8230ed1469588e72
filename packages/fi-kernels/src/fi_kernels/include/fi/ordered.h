// Floating-point numbers as unsigned integers of the same order, for exact selection; shared by device and CPU code.
#pragma once
#include "fi/types.h"

namespace fi {

// Of bits of an IEEE number of the word's width (fp32 in 32 bits, fp16 and bf16 in 16): a < b as numbers exactly if
// ordered(a) < ordered(b), but that -0 comes before +0, and NaN outside of the infinities on the side of its sign.
FI_HOST_DEVICE uint32_t ordered(uint32_t bits) { return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u); }
FI_HOST_DEVICE uint16_t ordered(uint16_t bits) {
  return static_cast<uint16_t>(bits ^ (bits >> 15 ? 0xffffu : 0x8000u));
}
// Back to the bits of the number.
FI_HOST_DEVICE uint32_t unordered(uint32_t key) { return key ^ (key >> 31 ? 0x80000000u : 0xffffffffu); }
FI_HOST_DEVICE uint16_t unordered(uint16_t key) { return static_cast<uint16_t>(key ^ (key >> 15 ? 0x8000u : 0xffffu)); }

}  // namespace fi
