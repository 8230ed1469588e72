// Merging of attention states in device code: weights from base-2 log-sum-exps, and back.
#pragma once
#include "fi/cuda/convert.cuh"

namespace fi {

FI_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// 2^(lse - top); 0 for a state without keys, also where top is -inf. A state of weight zero must have no part in a sum,
// whatever its values are: use weighted().
FI_DEVICE float state_weight(float lse, float top) { return lse == -infinity() ? 0.f : exp2f(lse - top); }
FI_DEVICE float weighted(float weight, float x) { return weight == 0.f ? 0.f : weight * x; }

// The log-sum-exp of states whose weights against `top` sum to `total`.
FI_DEVICE float state_lse(float top, float total) { return total == 0.f ? -infinity() : top + log2f(total); }

}  // namespace fi
