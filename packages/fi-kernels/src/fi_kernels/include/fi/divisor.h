// A number that kernels divide by, prepared by the host: one multiplication instead of twenty instructions.
#pragma once
#include "fi/types.h"

namespace fi {

// Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994), for dividends < 2^31.
struct Divisor {
  uint32_t value, magic, shift;
};

}  // namespace fi
