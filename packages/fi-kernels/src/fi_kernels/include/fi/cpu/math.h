// Elementary float functions of CPU kernels: branch-free, so loops over them vectorize; errors are within 2.5 ulp.
#pragma once

#include <cmath>
#include <cstdint>

#include "fi/cpu/convert.h"
#include "fi/cpu/target.h"

// Largest measured errors in ulp (tests/kernels/test_cpu_headers.py): exp 0.9, exp2 1.0, log2 1.7, tanh 1.3, erf 1.4,
// rsqrt 1.5, sigmoid 2.2, silu 2.2.
namespace fi::cpu {
namespace detail {

constexpr float kLn2 = 0x1.62e43p-1f;
constexpr float kLog2e = 0x1.715476p+0f;
// ln 2 in two parts: the high part has 9 bits, so its product with an exponent is exact with and without FMA.
constexpr float kLn2High = 0x1.63p-1f;
constexpr float kLn2Low = -0x1.bd0106p-13f;

// The nearest integer of a float |x| < 2^22, as float and as integer.
struct Rounded {
  float value;
  int32_t integer;
};

FI_INLINE Rounded round_nearest(float x) {
  constexpr float aligner = 0x1.8p23f;  // its last bit is worth 1; a cast to integer would be undefined for NaN
  const float sum = x + aligner;
  return {sum - aligner, static_cast<int32_t>(float_bits(sum) - float_bits(aligner))};
}

// min and max that keep a NaN x.
FI_INLINE float at_most(float x, float limit) { return select(x > limit, limit, x); }
FI_INLINE float at_least(float x, float limit) { return select(x < limit, limit, x); }

FI_INLINE float power_of_two(int32_t exponent) { return bits_float(static_cast<uint32_t>(exponent + 127) << 23); }

// x - n ln(2), where n is x / ln(2) rounded to nearest: an exact high part and a small low part. Their sum would round.
struct Reduced {
  float high, low;
  int32_t n;
};

FI_INLINE Reduced reduce_by_ln2(float x) {
  const Rounded n = round_nearest(x * kLog2e);
  return {x - n.value * kLn2High, -n.value * kLn2Low, n.integer};
}

// e^(high + low) - 1 for |high + low| <= ln(2)/2 (minimax, error 2^-28).
FI_INLINE float expm1_reduced(float high, float low) {
  const float r = high + low;
  float p = 0x1.6db4e8p-10f;
  p = p * r + 0x1.123bdep-7f;
  p = p * r + 0x1.55545ep-5f;
  p = p * r + 0x1.55548ep-3f;
  p = p * r + 0.5f;
  return (p * (r * r) + low) + high;
}

// x * 2^n for -150 <= n <= 129, in two steps, so that subnormals and overflow are right. n = -150 gives an exact zero
// without an underflow; an underflow is slow, and masked attention scores take this path.
FI_INLINE float scale(float x, int32_t n) {
  const int32_t half = n >> 1;
  const float second = select(n <= -150, 0.0f, power_of_two(n - half));
  return x * power_of_two(half) * second;
}

// 1 + e^x; infinite from x = 88.4 on. Subnormals do not change the sum, so it scales in one step: 10 % faster than exp.
FI_INLINE float one_plus_exp(float x) {
  const Reduced r = reduce_by_ln2(at_least(at_most(x, 89.0f), -87.0f));
  return 1.0f + power_of_two(r.n) * (1.0f + expm1_reduced(r.high, r.low));
}

FI_INLINE float magnitude(float x) { return bits_float(float_bits(x) & ~kSignMask); }

FI_INLINE float copy_sign(float magnitude, float sign) {
  return bits_float(float_bits(magnitude) | (float_bits(sign) & kSignMask));
}

}  // namespace detail

FI_INLINE float exp2(float x) {
  x = detail::at_least(detail::at_most(x, 129.0f), -150.0f);
  const detail::Rounded n = detail::round_nearest(x);
  return detail::scale(1.0f + detail::expm1_reduced((x - n.value) * detail::kLn2, 0.0f), n.integer);
}

FI_INLINE float exp(float x) {
  x = detail::at_least(detail::at_most(x, 89.0f), -104.0f);
  const detail::Reduced r = detail::reduce_by_ln2(x);
  return detail::scale(1.0f + detail::expm1_reduced(r.high, r.low), r.n);
}

FI_INLINE float log2(float x) {
  constexpr uint32_t smallest_normal = 0x00800000u, sqrt_half = 0x3f3504f3u;
  const bool subnormal = float_bits(x) < smallest_normal;
  const uint32_t u = float_bits(select(subnormal, x * 0x1p23f, x)) - sqrt_half;
  const int32_t exponent = (static_cast<int32_t>(u) >> 23) - (subnormal ? 23 : 0);
  const float f = bits_float((u & 0x007fffffu) + sqrt_half) - 1.0f;  // x = 2^exponent * (1 + f), f in [-0.293, 0.415)
  float p = -0x1.c25a4ep-4f;                                         // log2(1+f)/f, minimax, error 2^-27.9
  p = p * f + 0x1.7d493cp-3f;
  p = p * f - 0x1.874beap-3f;
  p = p * f + 0x1.a305a8p-3f;
  p = p * f - 0x1.eabc88p-3f;
  p = p * f + 0x1.277e36p-2f;
  p = p * f - 0x1.715a76p-2f;
  p = p * f + 0x1.ec7096p-2f;
  p = p * f - 0x1.71547p-1f;
  p = p * f + 0x1.715476p+0f;
  const float finite = p * f + static_cast<float>(exponent);
  const float at_or_below_zero = select(x == 0.0f, -HUGE_VALF, NAN);
  return select(x > 0.0f, select(x == HUGE_VALF, x, finite), select(x <= 0.0f, at_or_below_zero, x));
}

FI_INLINE float tanh(float x) {
  const float a = detail::at_most(detail::magnitude(x), 10.0f);
  const float t = a * a;
  float small = -0x1.736416p-8f;  // (tanh(a)/a - 1)/a^2 on [0, 0.63] in a^2, minimax, error 2^-27.6
  small = small * t + 0x1.519c9p-6f;
  small = small * t - 0x1.b827fep-5f;
  small = small * t + 0x1.110692p-3f;
  small = small * t - 0x1.55553p-2f;
  const detail::Reduced r = detail::reduce_by_ln2(2.0f * a);
  const float power = detail::power_of_two(r.n);
  const float large = 1.0f - 2.0f / (power * (1.0f + detail::expm1_reduced(r.high, r.low)) + 1.0f);
  return detail::copy_sign(select(a < 0.63f, small * (t * a) + a, large), x);
}

FI_INLINE float erf(float x) {
  const float a = detail::at_most(detail::magnitude(x), 4.0f);
  const float t = a * a;
  float small = 0x1.496a3p-14f;  // erf(a)/a - 1 on [0, 1] in a^2, minimax, error 2^-29
  small = small * t - 0x1.a3f7p-11f;
  small = small * t + 0x1.5405b2p-8f;
  small = small * t - 0x1.b7f90cp-6f;
  small = small * t + 0x1.ce2cf8p-4f;
  small = small * t - 0x1.81273ep-2f;
  small = small * t + 0x1.06eba8p-3f;
  float large = 0x1.18bb54p-12f;  // log2(erfc(a)) on [1, 4], minimax, error 2^-29 in erf
  large = large * a - 0x1.15ef72p-8f;
  large = large * a + 0x1.01b518p-5f;
  large = large * a - 0x1.30703p-3f;
  large = large * a - 0x1.d76e84p-1f;
  large = large * a - 0x1.a03fe6p+0f;
  large = large * a - 0x1.0b8c8cp-11f;
  const detail::Rounded n = detail::round_nearest(large);  // at least -28, so one step scales
  const float power = 1.0f + detail::expm1_reduced((large - n.value) * detail::kLn2, 0.0f);
  const float tail = detail::power_of_two(n.integer) * power;
  return detail::copy_sign(select(a < 1.0f, small * a + a, 1.0f - tail), x);
}

// NOTE: vectorizes only with -fno-math-errno; otherwise std::sqrt keeps a branch for errno.
FI_INLINE float rsqrt(float x) { return 1.0f / std::sqrt(x); }

// Below x = -88.3, where the true magnitude is less than 1e-36, the result is zero; silu(-inf) is the limit, -0.
FI_INLINE float sigmoid(float x) { return 1.0f / detail::one_plus_exp(-x); }
FI_INLINE float silu(float x) { return detail::at_least(x, -200.0f) / detail::one_plus_exp(-x); }

}  // namespace fi::cpu

namespace fi {

// These functions under the names that code shared with the device takes as `Math`, as of CudaMath.
struct CpuMath {
  FI_INLINE static float exp2(float x) { return cpu::exp2(x); }
  FI_INLINE static float log2(float x) { return cpu::log2(x); }
  FI_INLINE static float tanh(float x) { return cpu::tanh(x); }
  FI_INLINE static float erf(float x) { return cpu::erf(x); }
  FI_INLINE static float magnitude(float x) { return cpu::detail::magnitude(x); }
  FI_INLINE static float at_least(float x, float limit) { return cpu::detail::at_least(x, limit); }
  FI_INLINE static float at_most(float x, float limit) { return cpu::detail::at_most(x, limit); }
  FI_INLINE static float scaled_sigmoid(float x, float z) {
    return at_least(x, -200.0f) / cpu::detail::one_plus_exp(-z);
  }
};

}  // namespace fi
