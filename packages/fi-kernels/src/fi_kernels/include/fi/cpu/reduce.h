// Sum and maximum of a row, in enough independent SIMD accumulators to hide the latency of the additions.
#pragma once

#include <cmath>
#include <cstdint>

#include "fi/cpu/convert.h"
#include "fi/cpu/target.h"

namespace fi::cpu {
namespace detail {

// Four 512-bit accumulators: faster than two, and than `#pragma omp simd reduction`, which fixes the number of lanes
// before the clones exist (docs/notes/elementwise-cpu-sums.md).
constexpr int kLanes = 64;

template <class Term, class Combine>
FI_INLINE float reduce(int64_t n, float identity, Term&& term, Combine&& combine) {
  float lanes[kLanes];
  for (int j = 0; j < kLanes; ++j) lanes[j] = identity;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] = combine(lanes[j], term(i + j));
  }
  for (int j = 0; i + j < n; ++j) lanes[j] = combine(lanes[j], term(i + j));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] = combine(lanes[j], lanes[j + width]);
  }
  return lanes[0];
}

}  // namespace detail

// term(0) + ... + term(n - 1). The order of the additions depends on n only, so results are reproducible.
template <class Term>
FI_INLINE float sum(int64_t n, Term&& term) {
  return detail::reduce(n, 0.0f, term, [](float a, float b) __attribute__((always_inline)) { return a + b; });
}

// The largest of term(0) ... term(n - 1); -inf for n = 0. NaN terms are ignored.
template <class Term>
FI_INLINE float maximum(int64_t n, Term&& term) {
  return detail::reduce(n, -HUGE_VALF, term,
                        [](float a, float b) __attribute__((always_inline)) { return select(b > a, b, a); });
}

}  // namespace fi::cpu
