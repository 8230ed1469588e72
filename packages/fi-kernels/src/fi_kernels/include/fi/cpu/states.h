// Merging of attention states (a row of values and its base-2 log-sum-exp) in CPU kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "fi/cpu/math.h"
#include "fi/cpu/rows.h"

namespace fi::cpu {
namespace detail {

FI_CLONES inline void add_scaled(float* sum, const float* x, float weight, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sum[i] += weight * x[i];
}
FI_CLONES inline void scale_row(float* x, float factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace detail

// sum [d] becomes the merged values, and their log-sum-exp is returned; `row` [d] is scratch. lse(i) and values(i) give
// state i. A state of weight zero (lse -inf) is not read; no state of weight gives zeros and -inf.
template <class Lse, class Values>
float merge_states(int64_t count, Lse&& lse, Values&& values, LoadRow load, float* sum, float* row, int64_t d) {
  float top = -HUGE_VALF, total = 0.f;
  for (int64_t i = 0; i < count; ++i) top = lse(i) > top ? lse(i) : top;
  std::fill_n(sum, d, 0.f);
  for (int64_t i = 0; i < count; ++i) {
    const float weight = lse(i) == -HUGE_VALF ? 0.f : cpu::exp2(lse(i) - top);
    if (weight == 0.f) continue;
    total += weight;
    load(values(i), row, d);
    detail::add_scaled(sum, row, weight, d);
  }
  if (total == 0.f) return -HUGE_VALF;
  detail::scale_row(sum, 1.f / total, d);
  return top + cpu::log2(total);
}

}  // namespace fi::cpu
