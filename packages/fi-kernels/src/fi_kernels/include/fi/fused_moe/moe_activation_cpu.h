// Activations of rows of experts on the CPU.
#pragma once
#include "fi/cpu/math.h"
#include "fi/fused_moe/expert_activation.h"
#include "fi/fused_moe/moe_cpu.h"

namespace fi::cpu {

// u becomes the activated values of u and g.
using ActivateRow = void (*)(float*, const float*, const ExpertConstants&, int64_t);

template <ExpertActivation kAct>
FI_CLONES void activate_row(float* u, const float* g, const ExpertConstants& c, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) u[i] = activate_expert<CpuMath, kAct>(u[i], g[i], c);
}

inline ActivateRow row_activation(int64_t activation) {
  switch (activation) {
    case kExpertGelu:
      return activate_row<kExpertGelu>;
    case kExpertRelu:
      return activate_row<kExpertRelu>;
    case kExpertSilu:
      return activate_row<kExpertSilu>;
    case kExpertSwiglu:
      return activate_row<kExpertSwiglu>;
    case kExpertGeglu:
      return activate_row<kExpertGeglu>;
    case kExpertSwigluBias:
      return activate_row<kExpertSwigluBias>;
    case kExpertRelu2:
      return activate_row<kExpertRelu2>;
    case kExpertSwigluStep:
      return activate_row<kExpertSwigluStep>;
    case kExpertGegluTanh:
      return activate_row<kExpertGegluTanh>;
    case kExpertSitu:
      return activate_row<kExpertSitu>;
    case kExpertClampedRelu2:
      return activate_row<kExpertClampedRelu2>;
    default:
      return activate_row<kExpertIdentity>;
  }
}

}  // namespace fi::cpu
