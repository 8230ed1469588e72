// Device side of Divisor: quotients of 31-bit numbers by a number that the host prepared.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/divisor.h"

namespace fi {

FI_DEVICE uint32_t divide(uint32_t n, const Divisor& d) { return (__umulhi(n, d.magic) + n) >> d.shift; }

}  // namespace fi
