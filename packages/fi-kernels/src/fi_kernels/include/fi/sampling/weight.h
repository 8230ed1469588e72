// Computes probabilities as integer weights, and random numbers, with the same bits on every device; integer sums do
// not round.
#pragma once
#include "fi/exact.h"

namespace fi::sampling {

// Operations with one rounding each, which no compiler contracts or splits.
#if defined(__CUDA_ARCH__)
FI_EXACT float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FI_EXACT float mul_rn(float a, float b) { return __fmul_rn(a, b); }
FI_EXACT float add_rn(float a, float b) { return __fadd_rn(a, b); }
FI_EXACT double mul_rn(double a, double b) { return __dmul_rn(a, b); }
// x >> by, and 0 where by is at least the width, as the hardware instruction does.
FI_EXACT uint32_t shift_right(uint32_t x, uint32_t by) {
  uint32_t y;
  asm("shr.u32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(by));
  return y;
}
FI_EXACT uint64_t shift_right(uint64_t x, uint32_t by) {
  uint64_t y;
  asm("shr.u64 %0, %1, %2;" : "=l"(y) : "l"(x), "r"(by));
  return y;
}
FI_EXACT uint64_t high_product(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
FI_EXACT float min_number(float a, float b) { return fminf(a, b); }  // b where a is NaN
FI_EXACT float max_number(float a, float b) { return fmaxf(a, b); }
#else
FI_EXACT float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FI_EXACT float mul_rn(float a, float b) { return a * b; }
FI_EXACT float add_rn(float a, float b) { return a + b; }
FI_EXACT double mul_rn(double a, double b) { return a * b; }
FI_EXACT uint32_t shift_right(uint32_t x, uint32_t by) { return (x >> (by & 31u)) & (0u - uint32_t(by < 32u)); }
FI_EXACT uint64_t shift_right(uint64_t x, uint32_t by) { return by < 64 ? x >> by : 0; }
FI_EXACT float min_number(float a, float b) { return a < b ? a : b; }
FI_EXACT float max_number(float a, float b) { return a > b ? a : b; }
FI_EXACT uint64_t high_product(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}
#endif

constexpr uint32_t kInfinityBits = 0x7f800000u, kMaxFiniteBits = 0x7f7fffffu, kMinPositiveBits = 1u;  // bits of floats

// 2^-t for t >= 0 as y * 2^-shift with y in (0.99999, 2). Minimax polynomial, relative error 1.5e-7; exact for t = 0.
struct SplitExp2 {
  float y;
  uint32_t shift;  // above 2^29 for infinite and NaN t
};
FI_EXACT SplitExp2 split_exp2(float distance, float scale) {  // t = distance * scale
  constexpr float aligner = 0x1p23f;                          // its last bit is worth one
  // Just under one half keeps the fraction below 1; otherwise y could round to 2.
  const float aligned = add_rn(fma_rn(distance, scale, 0.49999f), aligner);
  const float f = fma_rn(-distance, scale, add_rn(aligned, -aligner));
  float y = fma_rn(0x1.e974fcp-10f, f, 0x1.277854p-7f);
  y = fma_rn(y, f, 0x1.c91ce6p-5f);
  y = fma_rn(y, f, 0x1.ebdb56p-3f);
  y = fma_rn(y, f, 0x1.62e4bap-1f);
  return {fma_rn(y, f, 1.0f), bits_of(aligned) - bits_of(aligner)};
}

// log2 of a normal number within 2 ulp, by the polynomial of cpu/math.h with a fixed order of operations.
FI_EXACT float log2_of(float x) {
  const uint32_t u = bits_of(x) - 0x3f3504f3u;  // sqrt(1/2)
  const float exponent = static_cast<float>(static_cast<int32_t>(u) >> 23);
  const float f = add_rn(from_bits((u & 0x007fffffu) + 0x3f3504f3u), -1.0f);
  float p = fma_rn(-0x1.c25a4ep-4f, f, 0x1.7d493cp-3f);
  p = fma_rn(p, f, -0x1.874beap-3f);
  p = fma_rn(p, f, 0x1.a305a8p-3f);
  p = fma_rn(p, f, -0x1.eabc88p-3f);
  p = fma_rn(p, f, 0x1.277e36p-2f);
  p = fma_rn(p, f, -0x1.715a76p-2f);
  p = fma_rn(p, f, 0x1.ec7096p-2f);
  p = fma_rn(p, f, -0x1.71547p-1f);
  p = fma_rn(p, f, 0x1.715476p+0f);
  return fma_rn(p, f, exponent);
}

// The scale of a row's weights. The weight of an element is floor(2^31 p / p_max), with p its probability and p_max
// that of the row maximum (for probabilities: the power of two at or below it). Sums of up to 2^24 weights are exact.
struct Scale {
  // Row maximum, at most the largest finite number; factor: log2(e) / temperature for logits, a power of two for
  // probabilities.
  float maximum, factor;
  float lowest;  // elements below it have no probability; above every element if no element has
};

FI_EXACT Scale logits_scale(float maximum, float temperature) {
  Scale s;
  // +inf takes all probability.
  s.lowest = bits_of(maximum) == kInfinityBits ? from_bits(kInfinityBits) : -from_bits(kMaxFiniteBits);
  s.maximum = maximum > from_bits(kMaxFiniteBits) ? from_bits(kMaxFiniteBits) : maximum;
  constexpr float log2e = 0x1.715476p+0f;
  s.factor = temperature <= 0.0f ? 0.0f : log2e / temperature;  // IEEE division on every device
  if (s.factor > 0x1p100f) s.factor = 0x1p100f;
  return s;
}
FI_EXACT Scale probs_scale(float maximum) {
  const uint32_t exponent = bits_of(maximum) >> 23;  // of a positive number; 0 for subnormals, which scale as 1 does
  Scale s;
  s.lowest = from_bits(bits_of(maximum) == kInfinityBits ? kInfinityBits : kMinPositiveBits);
  s.maximum = maximum > from_bits(kMaxFiniteBits) ? from_bits(kMaxFiniteBits) : maximum;
  s.factor = exponent > 253 ? from_bits(1u << (276 - exponent)) : from_bits((254 - (exponent ? exponent : 1)) << 23);
  return s;
}

// mantissa * 2^-shift is 2^31 p / p_max. Valid for elements from Scale::lowest on.
struct Weight {
  uint32_t mantissa, shift;
};
FI_EXACT Weight logit_weight(float x, const Scale& s) {
  const float distance = add_rn(s.maximum, -x);
  const SplitExp2 p = split_exp2(max_number(distance, 0.0f), s.factor);  // x = +inf
  return {bits_of(p.y) << 8, p.shift};                                   // bits of [1, 2) shifted left by 8 are 2^31 y
}
// logit_weight for any x but +inf; 0 for NaN and -inf.
FI_EXACT Weight finite_weight(float x, const Scale& s) {
  const SplitExp2 p = split_exp2(add_rn(s.maximum, -x), s.factor);
  return {bits_of(p.y) << 8, p.shift};
}
FI_EXACT Weight prob_weight(float x, const Scale& s) {
  const uint32_t z = bits_of(mul_rn(min_number(x, s.maximum), s.factor));
  return {z << 8 | 0x80000000u, 127 - (z >> 23)};
}
// prob_weight for any x but +inf; 0 for NaN and x <= 0.
FI_EXACT Weight positive_weight(float x, const Scale& s) {
  const uint32_t z = bits_of(mul_rn(x, s.factor));
  return {z << 8 | 0x80000000u, 127 - (z >> 23)};
}
// The weight of a draw; 0 for probabilities below 2^-31 of the maximum.
FI_EXACT uint32_t coarse_weight(Weight w) { return shift_right(w.mantissa, w.shift); }
// A weight in units 2^8 times finer: sums of up to 2^24 elements are exact, and accurate to one fp32 rounding as a
// divisor.
FI_EXACT uint64_t fine_weight(Weight w) { return shift_right(uint64_t{w.mantissa} << 8, w.shift); }
constexpr float kFineOne = 0x1p39f;  // the fine weight of the row maximum

// The probability over that of the row maximum, as a float; 0 below 2^-126.
FI_EXACT float ratio_of(const SplitExp2& p) {
  const bool normal = p.shift < 127;
  const float ratio = mul_rn(p.y, from_bits(normal ? (127 - p.shift) << 23 : 0u));
  return normal ? ratio : 0.0f;  // y is NaN where the distance overflows
}
FI_EXACT float logit_ratio(float x, const Scale& s) {
  const float distance = add_rn(s.maximum, -x);
  return ratio_of(split_exp2(max_number(distance, 0.0f), s.factor));
}
FI_EXACT float prob_ratio(float x, const Scale& s) { return mul_rn(min_number(x, s.maximum), s.factor); }

FI_EXACT uint64_t random_u64(const Random& r) { return uint64_t{r.x[1]} << 32 | r.x[0]; }
// Uniform over 0 ... total - 1, from 64 random bits (bias below total / 2^64).
FI_EXACT uint64_t uniform_below(uint64_t total, uint64_t random) { return high_product(random, total); }

// The top-p target: the smallest weight that reaches the share p of the total. Elements with less than it above them
// are allowed.
FI_EXACT uint64_t top_p_target(uint64_t total, float p) {
  const double target = mul_rn(static_cast<double>(p), static_cast<double>(total));
  if (!(target > 1.0)) return 1;  // also for NaN: the largest element alone
  const uint64_t whole = static_cast<uint64_t>(target);
  return whole + (static_cast<double>(whole) < target);
}

}  // namespace fi::sampling
