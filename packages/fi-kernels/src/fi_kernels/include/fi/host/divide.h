// Host side of Divisor: makes one.
#pragma once
#include <cstdint>

#include "fi/divisor.h"

namespace fi {

// 1 <= value < 2^31.
inline Divisor divisor(uint32_t value) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < value) ++shift;
  const uint64_t excess = (uint64_t{1} << shift) - value;
  return {value, static_cast<uint32_t>((excess << 32) / value + 1), shift};
}

}  // namespace fi
