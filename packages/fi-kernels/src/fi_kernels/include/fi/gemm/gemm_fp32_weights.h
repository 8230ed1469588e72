// Parameters of the GEMM of bf16 tokens and fp32 weights, shared by launcher and device code, and what both do to a
// weight.
#pragma once
#include "fi/types.h"

namespace fi {

// A CTA has 16 tokens by 8 rows of b; warps and CTAs of a cluster share k in blocks of 32.
constexpr int kFp32WeightsTokens = 16, kFp32WeightsRows = 8, kFp32WeightsWarps = 16, kFp32WeightsBlockK = 32;
constexpr int kFp32WeightsTerms = 3;

// out[i, j] = dot(a[i], b[j]). Strides are in elements.
struct GemmFp32WeightsParams {
  float* out;         // [m, n]
  const uint16_t* a;  // [m, k], bf16
  const float* b;     // [n, k]
  int64_t out_row_stride, a_row_stride, b_row_stride;
  int32_t m, n, k;
};

// An fp32 weight is the sum of three bf16 terms of 8 bits: the upper half of its bits, that of what is left, and the
// rest, which has 8 bits at most. Only parts below 2^-133 are lost. The other terms of an infinity or NaN are 0.
struct Bf16Terms {
  float of[kFp32WeightsTerms];  // whose lower 16 bits are 0

  template <class FromBits, class Bits>
  FI_HOST_DEVICE static Bf16Terms split(float weight, FromBits from_bits, Bits bits) {
    Bf16Terms x;
    x.of[0] = from_bits(bits(weight) & 0xffff0000u);
    const float left = (bits(weight) & 0x7f800000u) == 0x7f800000u ? 0.f : weight - x.of[0];
    x.of[1] = from_bits(bits(left) & 0xffff0000u);
    x.of[2] = from_bits(bits(left - x.of[1]) & 0xffff0000u);
    return x;
  }
};

// The sum of the products of all terms. Those of the first term decide where they are not finite: infinity times a
// later term of 0 is no number.
FI_HOST_DEVICE float sum_of_terms(const float (&sum)[kFp32WeightsTerms]) {
  const float later = sum[1] + sum[2], first = sum[0];
  return first - first == 0.f ? first + later : first;
}

}  // namespace fi
