// What the CPU kernels of the mhc family share.
#pragma once
#include "fi/cpu/row_convert.h"

namespace fi::cpu {

inline FI_CLONES void add_scaled(float* y, const float* x, float factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += x[i] * factor;
}

}  // namespace fi::cpu
