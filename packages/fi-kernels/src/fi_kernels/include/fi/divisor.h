// Fast integer division by a divisor that the host prepares: one multiplication instead of about twenty instructions.
#pragma once
#include "fi/types.h"

namespace fi {

// Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994), for dividends < 2^31.
struct Divisor {
  uint32_t value, magic, shift;
};

// 1 <= value < 2^31.
FI_HOST_DEVICE Divisor divisor(uint32_t value) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < value) ++shift;
  const uint64_t excess = (uint64_t{1} << shift) - value;
  return {value, static_cast<uint32_t>((excess << 32) / value + 1), shift};
}

FI_HOST_DEVICE uint32_t divide(uint32_t n, const Divisor& d) {
  return (static_cast<uint32_t>((uint64_t{n} * d.magic) >> 32) + n) >> d.shift;
}

}  // namespace fi
