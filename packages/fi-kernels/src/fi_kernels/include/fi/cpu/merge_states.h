// Merges attention states (a row of values and its base-2 lse) in CPU kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "fi/cpu/math.h"
#include "fi/cpu/row_convert.h"

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

// Writes the merged values to out [d] and returns their lse; `row` [d] is scratch. lse(i) and values(i) return state i.
// A state of weight zero (lse -inf) is not read. If all weights are zero, out is zero and the lse is -inf.
template <class Lse, class Values>
float merge_states(int64_t count, Lse&& lse, Values&& values, LoadRow load, float* out, float* row, int64_t d) {
  float max_lse = -HUGE_VALF, weight_sum = 0.f;
  for (int64_t i = 0; i < count; ++i) max_lse = lse(i) > max_lse ? lse(i) : max_lse;
  std::fill_n(out, d, 0.f);
  for (int64_t i = 0; i < count; ++i) {
    const float weight = lse(i) == -HUGE_VALF ? 0.f : cpu::exp2(lse(i) - max_lse);
    if (weight == 0.f) continue;
    weight_sum += weight;
    load(values(i), row, d);
    detail::add_scaled(out, row, weight, d);
  }
  if (weight_sum == 0.f) return -HUGE_VALF;
  detail::scale_row(out, 1.f / weight_sum, d);
  return max_lse + cpu::log2(weight_sum);
}

}  // namespace fi::cpu
