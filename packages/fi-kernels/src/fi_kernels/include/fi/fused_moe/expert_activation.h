// Activations of an expert: of the gate g and the linear projection u, or of one projection. fp32, for CPU and CUDA.
#pragma once
#include "fi/activation.h"

namespace fi {

// The values are those of ActivationType in fi_core.tllm_enums.
enum ExpertActivation : int32_t {
  kExpertGelu = 0,
  kExpertRelu = 1,
  kExpertSilu = 2,
  kExpertSwiglu = 3,
  kExpertGeglu = 4,
  kExpertSwigluBias = 5,
  kExpertRelu2 = 6,
  kExpertSwigluStep = 7,
  kExpertGegluTanh = 8,
  kExpertIdentity = 9,
  kExpertSitu = 10,
  kExpertClampedRelu2 = 12,
};

FI_HOST_DEVICE constexpr bool is_gated(ExpertActivation a) {
  return a == kExpertSwiglu || a == kExpertGeglu || a == kExpertSwigluBias || a == kExpertSwigluStep ||
         a == kExpertGegluTanh || a == kExpertSitu;
}

// Constants of an expert: SwigluBias has all three; SwigluStep has limit; Situ has beta for the gate and alpha for u;
// ClampedRelu2 has limit.
struct ExpertConstants {
  float alpha, beta, limit;
};

// Above it, alpha of Situ does not bound u: alpha tanh(u / alpha) is u there, which an approximate tanh cannot give.
constexpr float kUnbounded = 1e30f;

// Of one projection x, or of u and g where the activation is gated. NaN stays NaN.
template <class Math, ExpertActivation kAct>
FI_HOST_DEVICE float activate_expert(float u, float g, const ExpertConstants& c) {
  const auto clamp = [&](float x) { return x > c.limit ? c.limit : x < -c.limit ? -c.limit : x; };
  if constexpr (kAct == kExpertSwiglu) return activate<Math, kSilu, true>(g) * u;
  if constexpr (kAct == kExpertGeglu) return activate<Math, kGelu, true>(g) * u;
  if constexpr (kAct == kExpertGegluTanh) return activate<Math, kGeluTanh, true>(g) * u;
  if constexpr (kAct == kExpertSwigluBias) {
    const float gate = g > c.limit ? c.limit : g;
    return Math::scaled_sigmoid(gate, c.alpha * gate) * (clamp(u) + c.beta);
  }
  if constexpr (kAct == kExpertSwigluStep) {
    const float gate = activate<Math, kSilu, true>(g);
    return (gate > c.limit ? c.limit : gate) * clamp(u);
  }
  if constexpr (kAct == kExpertSitu) {
    const float linear = c.alpha > kUnbounded ? u : c.alpha * Math::tanh(u / c.alpha);
    return Math::scaled_sigmoid(c.beta, g) * Math::tanh(g / c.beta) * linear;
  }
  if constexpr (kAct == kExpertGelu) return activate<Math, kGelu, true>(u);
  if constexpr (kAct == kExpertSilu) return activate<Math, kSilu, true>(u);
  const float positive = u < 0.f ? 0.f : u;
  if constexpr (kAct == kExpertRelu) return positive;
  if constexpr (kAct == kExpertRelu2) return positive * positive;
  if constexpr (kAct == kExpertClampedRelu2) {
    const float y = c.limit * Math::tanh(positive / c.limit);
    return y * y;
  }
  return u;
}

}  // namespace fi
