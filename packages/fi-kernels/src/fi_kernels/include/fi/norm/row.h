// Arithmetic on float rows that the norms' CPU kernels share.
#pragma once
#include <cmath>
#include <cstdint>

#include "fi/cpu/reduce.h"
#include "fi/cpu/target.h"

namespace fi::cpu {

inline FI_CLONES void add_to(float* s, const float* r, int32_t d) {
#pragma omp simd
  for (int32_t i = 0; i < d; ++i) s[i] += r[i];
}

// sum((s - center)^2)
inline FI_CLONES float squares(const float* s, float center, int32_t d) {
  return sum(d, [=](int64_t i) __attribute__((always_inline)) { return (s[i] - center) * (s[i] - center); });
}

inline FI_CLONES void multiply(float* s, const float* weight, float factor, int32_t d) {
#pragma omp simd
  for (int32_t i = 0; i < d; ++i) s[i] = s[i] * factor * weight[i];
}

}  // namespace fi::cpu
