// Probabilities as integers, and the random number of a row: the same bits on every device, for sums that do not round.
#pragma once
#include "fi/types.h"

// Inlined into each clone of a CPU worker (see fi/cpu/target.h) as into kernels.
#if defined(__CUDACC__)
#define FI_EXACT __host__ __device__ __forceinline__
#else
#define FI_EXACT inline __attribute__((always_inline))
#endif

namespace fi::sampling {

// Single roundings that no compiler may contract or split.
#if defined(__CUDA_ARCH__)
FI_EXACT float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FI_EXACT float times(float a, float b) { return __fmul_rn(a, b); }
FI_EXACT float plus(float a, float b) { return __fadd_rn(a, b); }
FI_EXACT double times(double a, double b) { return __dmul_rn(a, b); }
FI_EXACT uint32_t bits_of(float x) { return __float_as_uint(x); }
FI_EXACT float of_bits(uint32_t x) { return __uint_as_float(x); }
// x >> by, and 0 where that is all bits or more: what the hardware does.
FI_EXACT uint32_t shifted(uint32_t x, uint32_t by) {
  uint32_t y;
  asm("shr.u32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(by));
  return y;
}
FI_EXACT uint64_t shifted(uint64_t x, uint32_t by) {
  uint64_t y;
  asm("shr.u64 %0, %1, %2;" : "=l"(y) : "l"(x), "r"(by));
  return y;
}
FI_EXACT uint64_t high_product(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
FI_EXACT float lesser(float a, float b) { return fminf(a, b); }  // b where a is NaN
FI_EXACT float greater(float a, float b) { return fmaxf(a, b); }
#else
FI_EXACT float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FI_EXACT float times(float a, float b) { return a * b; }
FI_EXACT float plus(float a, float b) { return a + b; }
FI_EXACT double times(double a, double b) { return a * b; }
FI_EXACT uint32_t bits_of(float x) {
  uint32_t y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
FI_EXACT float of_bits(uint32_t x) {
  float y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
FI_EXACT uint32_t shifted(uint32_t x, uint32_t by) { return (x >> (by & 31u)) & (0u - uint32_t(by < 32u)); }
FI_EXACT uint64_t shifted(uint64_t x, uint32_t by) { return by < 64 ? x >> by : 0; }
FI_EXACT float lesser(float a, float b) { return a < b ? a : b; }
FI_EXACT float greater(float a, float b) { return a > b ? a : b; }
FI_EXACT uint64_t high_product(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}
#endif

constexpr uint32_t kInfinity = 0x7f800000u, kLargest = 0x7f7fffffu, kSmallest = 1u;  // bits of floats

// 2^-t for t >= 0 as y * 2^-shift with y in (0.99999, 2). Minimax polynomial, relative error 1.5e-7; exact for t = 0.
struct Power {
  float y;
  uint32_t shift;  // above 2^29 for infinite and NaN t
};
FI_EXACT Power power(float distance, float scale) {  // t = distance * scale
  constexpr float aligner = 0x1p23f;                 // its last bit is worth one
  // Just under one half: the part left over is then below 1, else y could round to 2.
  const float aligned = plus(fused(distance, scale, 0.49999f), aligner);
  const float f = fused(-distance, scale, plus(aligned, -aligner));
  float y = fused(0x1.e974fcp-10f, f, 0x1.277854p-7f);
  y = fused(y, f, 0x1.c91ce6p-5f);
  y = fused(y, f, 0x1.ebdb56p-3f);
  y = fused(y, f, 0x1.62e4bap-1f);
  return {fused(y, f, 1.0f), bits_of(aligned) - bits_of(aligner)};
}

// log2 of a normal number within 2 ulp; the polynomial of cpu/math.h in one order of operations.
FI_EXACT float log2_of(float x) {
  const uint32_t u = bits_of(x) - 0x3f3504f3u;  // sqrt(1/2)
  const float exponent = static_cast<float>(static_cast<int32_t>(u) >> 23);
  const float f = plus(of_bits((u & 0x007fffffu) + 0x3f3504f3u), -1.0f);
  float p = fused(-0x1.c25a4ep-4f, f, 0x1.7d493cp-3f);
  p = fused(p, f, -0x1.874beap-3f);
  p = fused(p, f, 0x1.a305a8p-3f);
  p = fused(p, f, -0x1.eabc88p-3f);
  p = fused(p, f, 0x1.277e36p-2f);
  p = fused(p, f, -0x1.715a76p-2f);
  p = fused(p, f, 0x1.ec7096p-2f);
  p = fused(p, f, -0x1.71547p-1f);
  p = fused(p, f, 0x1.715476p+0f);
  return fused(p, f, exponent);
}

// How a row weighs its elements. The weight is floor(2^31 p / p') with p the probability of an element and p' that of
// the largest (for probabilities: the power of two at or below it), so sums of up to 2^24 elements are exact.
struct Scale {
  float top, factor;  // largest, if finite; log2(e) / temperature for logits, a power of two for probabilities
  float lowest;       // elements below it have no probability; above every element if there is none with probability
};

FI_EXACT Scale logits_scale(float top, float temperature) {
  Scale s;
  s.lowest = bits_of(top) == kInfinity ? of_bits(kInfinity) : -of_bits(kLargest);  // +inf takes all
  s.top = top > of_bits(kLargest) ? of_bits(kLargest) : top;
  constexpr float log2e = 0x1.715476p+0f;
  s.factor = temperature == 0.0f ? 0.0f : log2e / temperature;  // IEEE division on every device
  if (s.factor > 0x1p100f) s.factor = 0x1p100f;
  return s;
}
FI_EXACT Scale probs_scale(float top) {
  const uint32_t exponent = bits_of(top) >> 23;  // of a positive number; 0 for subnormals, which scale as 1 does
  Scale s;
  s.lowest = of_bits(bits_of(top) == kInfinity ? kInfinity : kSmallest);
  s.top = top > of_bits(kLargest) ? of_bits(kLargest) : top;
  s.factor = exponent > 253 ? of_bits(1u << (276 - exponent)) : of_bits((254 - (exponent ? exponent : 1)) << 23);
  return s;
}

// mantissa * 2^-shift is 2^31 p / p'. Of elements >= lowest alone.
struct Weight {
  uint32_t mantissa, shift;
};
FI_EXACT Weight logit_weight(float x, const Scale& s) {
  const float distance = plus(s.top, -x);
  const Power p = power(greater(distance, 0.0f), s.factor);  // x = +inf
  return {bits_of(p.y) << 8, p.shift};                       // bits of [1, 2) shifted left by 8 are 2^31 y
}
// The same for any x that is not +inf, and none for what is not a number or -inf.
FI_EXACT Weight finite_weight(float x, const Scale& s) {
  const Power p = power(plus(s.top, -x), s.factor);
  return {bits_of(p.y) << 8, p.shift};
}
FI_EXACT Weight prob_weight(float x, const Scale& s) {
  const uint32_t z = bits_of(times(lesser(x, s.top), s.factor));
  return {z << 8 | 0x80000000u, 127 - (z >> 23)};
}
// The same for any x that is not +inf, and none for what is not a number or not positive.
FI_EXACT Weight positive_weight(float x, const Scale& s) {
  const uint32_t z = bits_of(times(x, s.factor));
  return {z << 8 | 0x80000000u, 127 - (z >> 23)};
}
// The weight of a draw; 0 for what is more than 31 powers of two below the top.
FI_EXACT uint32_t coarse(Weight w) { return shifted(w.mantissa, w.shift); }
// 2^8 times as fine: sums of up to 2^24 elements are exact, and right to one rounding of fp32 as a divisor.
FI_EXACT uint64_t fine(Weight w) { return shifted(uint64_t{w.mantissa} << 8, w.shift); }
constexpr float kFineOne = 0x1p39f;  // of an element as large as the scale

// The probability over that of the largest, as a float; 0 below 2^-126.
FI_EXACT float ratio_of(const Power& p) {
  const bool normal = p.shift < 127;
  const float ratio = times(p.y, of_bits(normal ? (127 - p.shift) << 23 : 0u));
  return normal ? ratio : 0.0f;  // y is NaN where the distance overflows
}
FI_EXACT float logit_ratio(float x, const Scale& s) {
  const float distance = plus(s.top, -x);
  return ratio_of(power(greater(distance, 0.0f), s.factor));
}
FI_EXACT float prob_ratio(float x, const Scale& s) { return times(lesser(x, s.top), s.factor); }

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 128 random bits of a counter.
struct Random {
  uint32_t x[4];
};
FI_EXACT Random philox(uint64_t seed, uint64_t offset, uint64_t subsequence) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(offset), c1 = static_cast<uint32_t>(offset >> 32);
  uint32_t c2 = static_cast<uint32_t>(subsequence), c3 = static_cast<uint32_t>(subsequence >> 32);
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c0 = n0, c1 = static_cast<uint32_t>(b), c2 = n2, c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
FI_EXACT uint64_t random_of(const Random& r) { return uint64_t{r.x[1]} << 32 | r.x[0]; }
// Uniform over 0 ... total - 1, from 64 random bits (bias below total / 2^64).
FI_EXACT uint64_t uniform_below(uint64_t total, uint64_t random) { return high_product(random, total); }

// The least weight that reaches a share of the total: allowed are elements with less than it above them.
FI_EXACT uint64_t share_of(uint64_t total, float p) {
  const double wanted = times(static_cast<double>(p), static_cast<double>(total));
  if (!(wanted > 1.0)) return 1;  // also NaN: the largest alone
  const uint64_t whole = static_cast<uint64_t>(wanted);
  return whole + (static_cast<double>(whole) < wanted);
}

}  // namespace fi::sampling
