// Online softmax in base 2 (Milakov & Gimelshein 2018, arXiv:1805.02867); shared by device and CPU code.
// The state of a row is its largest score m and d = sum 2^(s - m); with no visible key m = -inf, d = 0, and nothing is
// NaN.
#pragma once
#include "fi/attention/scores.h"

namespace fi {

#if defined(__CUDACC__)  // NVRTC has no name for infinity, and only its compiler divides by zero in a constant
constexpr float kMinusInf = -1.f / 0.f;
#else
constexpr float kMinusInf = -__builtin_huge_valf();
#endif

// What scores are taken relative to: m, or 0 while no key has been seen (-inf - -inf would be NaN).
FI_HOST_DEVICE float softmax_reference(float m) { return m == kMinusInf ? 0.f : m; }

// 2^(s - base): the weight of a key, or the factor of an older state whose maximum was s.
template <class Math>
FI_HOST_DEVICE float softmax_exp2(float s, float base) {
  return Math::exp2(s - base);
}

// What the weighted sum of values is multiplied by at the end; 0 for an empty row.
FI_HOST_DEVICE float inverse_row_sum(float d) { return d == 0.f ? 0.f : 1.f / d; }

// log2 of the sum of 2^s; -inf for an empty row.
template <class Math>
FI_HOST_DEVICE float softmax_lse(float m, float d) {
  return d == 0.f ? kMinusInf : m + Math::log2(d);
}

// What a head's sink adds to the sum of a row whose largest score is m (Xiao et al. 2023, arXiv:2309.17453, as a
// learned logit): m becomes the new maximum, and d the sum against it; the weighted values must be multiplied by the
// result.
template <class Math>
FI_HOST_DEVICE float add_sink(float sink, float& m, float& d) {
  const float s = sink * kLog2e, top = s > m ? s : m, base = softmax_reference(top);
  const float factor = softmax_exp2<Math>(m, base);
  d = d * factor + softmax_exp2<Math>(s, base);
  m = top;
  return factor;
}

}  // namespace fi
