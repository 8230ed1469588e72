// From a dot product to a score: scale, soft cap, ALiBi; shared by device and CPU code.
#pragma once
#include "fi/types.h"

namespace fi {

constexpr float kLog2e = 1.4426950408889634f;

// ALiBi slope of a head (Press et al. 2021, arXiv:2108.12409): with n2 the largest power of two <= heads, the series
// 2^(-8k/n2), k = 1..n2; further heads take every second term of the series for 2 * n2.
template <class Math>
FI_HOST_DEVICE float alibi_slope(int32_t head, int32_t heads) {
  int32_t n2 = 1;
  while (n2 * 2 <= heads) n2 *= 2;
  const auto n = static_cast<float>(n2);
  if (head < n2) return Math::exp2(-8.f * static_cast<float>(head + 1) / n);
  return Math::exp2(-4.f * static_cast<float>(2 * (head - n2) + 1) / n);
}

// Scores of one head in base 2, s * log2(e), so that the softmax takes exp2 and log2.
struct HeadScores {
  float scale;  // of the dot product: multiply q or the product by it before calling score
  float cap;    // 0: none
  float slope;  // 0: no ALiBi

  // distance = j - i, counted inside the call.
  template <class Math>
  FI_HOST_DEVICE float score(float scaled, float distance) const {
    return (cap > 0.f ? cap * Math::tanh(scaled) : scaled) + slope * distance;
  }
};

// s = x * sm_scale, or soft_cap * tanh(x * sm_scale / soft_cap); ALiBi adds slope * (j - i) to either.
struct Scores {
  float sm_scale;
  float soft_cap;  // <= 0: none
  int32_t alibi;

  FI_HOST_DEVICE float cap() const { return soft_cap > 0.f ? soft_cap * kLog2e : 0.f; }  // of HeadScores

  // dequant: product of the factors of q and k.
  FI_HOST_DEVICE HeadScores without_alibi(float dequant) const {
    return {sm_scale * dequant * (soft_cap > 0.f ? 1.f / soft_cap : kLog2e), cap(), 0.f};
  }
  template <class Math>
  FI_HOST_DEVICE HeadScores of_head(int32_t head, int32_t heads, float dequant) const {
    HeadScores h = without_alibi(dequant);
    if (alibi) h.slope = alibi_slope<Math>(head, heads) * kLog2e;
    return h;
  }
};

}  // namespace fi
