// The elementary functions that the shared attention headers take as `Math`, for CPU code.
#pragma once
#include "fi/cpu/math.h"

namespace fi {

struct CpuMath {
  FI_INLINE static float exp2(float x) { return cpu::exp2(x); }
  FI_INLINE static float log2(float x) { return cpu::log2(x); }
  FI_INLINE static float tanh(float x) { return cpu::tanh(x); }
};

}  // namespace fi
