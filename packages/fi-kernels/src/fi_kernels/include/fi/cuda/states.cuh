// Merging of attention states in device code: weights from base-2 log-sum-exps, and back.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/ptx/math.cuh"

namespace fi {

FI_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// NOTE: approximations of one instruction, whose errors (2^-22) are below those of 16-bit values and of fp32 sums.

// 2^(lse - top); 0 for a state without keys, also where top is -inf. A state of weight zero must have no part in a sum,
// whatever its values are: use weighted().
FI_DEVICE float state_weight(float lse, float top) { return lse == -infinity() ? 0.f : exp2_approx(lse - top); }
FI_DEVICE float weighted(float weight, float x) { return weight == 0.f ? 0.f : weight * x; }

// The log-sum-exp of states whose weights against `top` sum to `total`.
FI_DEVICE float state_lse(float top, float total) { return total == 0.f ? -infinity() : top + log2_approx(total); }

// The reciprocal of a sum of weights, which is 0, NaN, or at least 1 since the largest weight is 1; exact for 1, so
// that a lone state is copied. (A full division calls a subroutine for ranges that cannot occur.)
FI_DEVICE float inverse_total(float total) { return total <= 1.f ? total : __fdividef(1.f, total); }

}  // namespace fi
