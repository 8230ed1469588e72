// Loops over one fp32 row that the CPU kernels of the norms share.
#pragma once
#include <cmath>
#include <cstdint>

#include "fi/cpu/reduce.h"
#include "fi/cpu/target.h"

namespace fi::cpu {

// x += residual
inline FI_CLONES void add_residual(float* x, const float* residual, int32_t d) {
#pragma omp simd
  for (int32_t i = 0; i < d; ++i) x[i] += residual[i];
}

// sum((x - center)^2)
inline FI_CLONES float sum_of_squares(const float* x, float center, int32_t d) {
  return sum(d, [=](int64_t i) __attribute__((always_inline)) { return (x[i] - center) * (x[i] - center); });
}

// x *= factor * weight
inline FI_CLONES void scale_by_weight(float* x, const float* weight, float factor, int32_t d) {
#pragma omp simd
  for (int32_t i = 0; i < d; ++i) x[i] = x[i] * factor * weight[i];
}

}  // namespace fi::cpu
