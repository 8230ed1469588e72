// Online softmax in base 2 (Milakov & Gimelshein 2018, arXiv:1805.02867); shared by device and CPU code.
// The state of a row is row_max, its largest score s, and row_sum = sum 2^(s - row_max). With no visible key row_max is
// -inf and row_sum 0, and nothing is NaN.
#pragma once
#include "fi/attention/scores.h"

namespace fi {

#if defined(__CUDACC__)  // NVRTC has no name for infinity, and only its compiler divides by zero in a constant
constexpr float kMinusInf = -1.f / 0.f;
#else
constexpr float kMinusInf = -__builtin_huge_valf();
#endif

// The subtrahend of scores: row_max, or 0 while no key is visible (-inf - -inf would be NaN).
FI_HOST_DEVICE float softmax_reference(float row_max) { return row_max == kMinusInf ? 0.f : row_max; }

// 2^(s - reference): the unnormalised probability of a key, or the rescale factor of a state whose row_max was s.
template <class Math>
FI_HOST_DEVICE float softmax_exp2(float s, float reference) {
  return Math::exp2(s - reference);
}

// The factor that normalises an output row; 0 for an empty row.
FI_HOST_DEVICE float inverse_row_sum(float row_sum) { return row_sum == 0.f ? 0.f : 1.f / row_sum; }

// log2 of the sum of 2^s; -inf for an empty row.
template <class Math>
FI_HOST_DEVICE float softmax_lse(float row_max, float row_sum) {
  return row_sum == 0.f ? kMinusInf : row_max + Math::log2(row_sum);
}

// Adds the attention sink of a head, a learned logit, to the state of a row (Xiao et al. 2023, arXiv:2309.17453).
// Returns the rescale factor of the output row.
template <class Math>
FI_HOST_DEVICE float add_sink(float sink, float& row_max, float& row_sum) {
  const float s = sink * kLog2e, new_max = s > row_max ? s : row_max, reference = softmax_reference(new_max);
  const float rescale = softmax_exp2<Math>(row_max, reference);
  row_sum = row_sum * rescale + softmax_exp2<Math>(s, reference);
  row_max = new_max;
  return rescale;
}

}  // namespace fi
