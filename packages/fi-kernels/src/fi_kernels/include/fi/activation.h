// Activation functions of one fp32 value, with the CPU's or CUDA's elementary functions.
#pragma once
#include "fi/polynomial.h"

namespace fi {

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// 0.5 (1 + tanh(u)) = sigmoid(2 u), whose right side has no cancellation for x < 0; this is 2 u of gelu_tanh.
FI_HOST_DEVICE float gelu_sigmoid_argument(float x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }

// log2(Q(a)) for a >= 0, where Q(a) = erfc(a / sqrt(2)) / 2 is the Gaussian tail. gelu(x) = max(x, 0) - |x| Q(|x|) has
// no cancellation. log2(Q) is nearly a parabola, so this polynomial and one exp2 cost a third of erf. The polynomial is
// minimax on [0, 6] with a relative error of 3e-6 in Q, enough for 16-bit types; beyond 6 it falls to -inf, as log2(Q).
FI_HOST_DEVICE float log2_gelu_tail(float a) {
  return polynomial(a, -1.83481097e-06f, 6.15982863e-05f, -9.3052478e-04f, 8.50789063e-03f, -5.396007e-02f,
                    -4.58464384e-01f, -1.15125108f, -9.99995291e-01f);
}

// exact: relative precision of fp32, else of 16-bit types. Lower bounds of x prevent -inf * 0: the limit at -inf is -0.
template <class Math, Activation kAct, bool kExact>
FI_HOST_DEVICE float activate(float x) {
  if constexpr (kAct == kSilu) return Math::scaled_sigmoid(x, x);
  if constexpr (kAct == kGeluTanh) return Math::scaled_sigmoid(x, gelu_sigmoid_argument(x));
  if constexpr (kExact) return 0.5f * Math::at_least(x, -200.f) * (1.f + Math::erf(x * 0.7071067811865476f));
  const float a = Math::magnitude(x);
  return Math::at_least(x, 0.f) - Math::at_most(a, 200.f) * Math::exp2(log2_gelu_tail(a));
}

}  // namespace fi
