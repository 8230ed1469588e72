// Storage types of CPU kernels and their conversions to and from float: branch-free integer code, which vectorises.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fi/cpu/target.h"

namespace fi::cpu {

struct bf16_t {
  uint16_t bits;
};
struct f16_t {
  uint16_t bits;
};
struct e4m3_t {  // "fn" flavour: no infinity, NaN = 0x7f, largest 448
  uint8_t bits;
};
struct e5m2_t {  // IEEE-like, largest 57344
  uint8_t bits;
};

FI_INLINE uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

FI_INLINE float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

// condition ? a : b as bit masks.
// NOTE: with ?: GCC moves the float arithmetic of an operand into a branch, and then does not vectorise the loop.
FI_INLINE uint32_t select(bool condition, uint32_t a, uint32_t b) { return b ^ ((a ^ b) & (0u - uint32_t(condition))); }

FI_INLINE float select(bool condition, float a, float b) {
  return bits_float(select(condition, float_bits(a), float_bits(b)));
}

namespace detail {

constexpr uint32_t kSignMask = 0x80000000u;
constexpr uint32_t kFloatInf = 0x7f800000u;

// Decodes the finite magnitudes of a format with kExponent exponent and kMantissa mantissa bits. A subnormal decoded as
// if it were normal gives a = 2^k (1 + m), where 2^(k+1) is the smallest normal; its value is 2 a - 2^(k+1). That value
// is less than a for subnormals only, so std::min selects it. No float subnormal occurs, so the result is exact under
// flush-to-zero, and never slow.
template <int kExponent, int kMantissa>
FI_INLINE uint32_t decode_magnitude(uint32_t magnitude) {
  constexpr uint32_t rebias = uint32_t(128 - (1 << (kExponent - 1))) << 23;
  constexpr uint32_t smallest_normal = rebias + (1u << 23);
  const uint32_t normal = (magnitude << (23 - kMantissa)) + rebias;
  return std::min(normal, float_bits(2.0f * bits_float(normal) - bits_float(smallest_normal)));
}

// Encodes a float magnitude, rounded to nearest even, without an upper limit: the caller handles overflow. Subnormals
// are rounded by adding a power of two whose last bit is the format's smallest step. The encoding as a normal number is
// smaller or negative for subnormals, so std::max selects the right one.
template <int kExponent, int kMantissa>
FI_INLINE uint32_t encode_magnitude(uint32_t magnitude) {
  constexpr uint32_t shift = 23 - kMantissa;
  constexpr uint32_t rebias = uint32_t(128 - (1 << (kExponent - 1))) << 23;
  constexpr uint32_t smallest_normal = rebias + (1u << 23);
  constexpr uint32_t aligner = smallest_normal + (shift << 23);
  const uint32_t rounded = magnitude - rebias + ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1u);
  const float low = bits_float(std::min(magnitude, smallest_normal));
  const uint32_t subnormal = float_bits(low + bits_float(aligner)) - aligner;
  return static_cast<uint32_t>(std::max(static_cast<int32_t>(rounded) >> shift, static_cast<int32_t>(subnormal)));
}

// The bits of a float in the format; `nan` stands for NaN, and magnitudes above `limit` become `limit`.
template <int kExponent, int kMantissa>
FI_INLINE uint32_t encode(float value, uint32_t nan, uint32_t limit) {
  const uint32_t u = float_bits(value), magnitude = u & ~kSignMask;
  const uint32_t finite = encode_magnitude<kExponent, kMantissa>(magnitude);
  const uint32_t encoded = select(magnitude > kFloatInf, nan, std::min(finite, limit));
  return encoded | (u & kSignMask) >> (31 - kExponent - kMantissa);
}

}  // namespace detail

// Converts to float, exactly for every value. NaN stays NaN.
template <class T>
float to_float(T value);

template <>
FI_INLINE float to_float(float value) {
  return value;
}

template <>
FI_INLINE float to_float(bf16_t value) {
  return bits_float(uint32_t(value.bits) << 16);
}

template <>
FI_INLINE float to_float(f16_t value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t special = select(magnitude >= 0x7c00u, detail::kFloatInf, 0u);
  return bits_float(detail::decode_magnitude<5, 10>(magnitude) | special | ((value.bits & 0x8000u) << 16));
}

template <>
FI_INLINE float to_float(e4m3_t value) {
  const uint32_t magnitude = value.bits & 0x7fu;
  const uint32_t special = select(magnitude == 0x7fu, detail::kFloatInf, 0u);
  return bits_float(detail::decode_magnitude<4, 3>(magnitude) | special | ((value.bits & 0x80u) << 24));
}

template <>
FI_INLINE float to_float(e5m2_t value) {
  return to_float(f16_t{static_cast<uint16_t>(value.bits << 8)});
}

// The value of an e2m1 code, 0 to 15.
inline float e2m1_to_float(uint32_t code) {
  static constexpr float kValues[] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                      -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
  return kValues[code];
}

// The value of a ue8m0 code, 2^(code - 127); 255 is NaN.
inline float ue8m0_to_float(uint8_t code) {
  return bits_float(code == 255 ? 0x7fc00000u : code ? uint32_t{code} << 23 : 0x00400000u);
}

// Converts from float, rounded to nearest even. bf16 and f16 overflow to infinity; e4m3 and e5m2 saturate, infinity
// included. NaN stays NaN.
template <class T>
T from_float(float value);

template <>
FI_INLINE float from_float(float value) {
  return value;
}

template <>
FI_INLINE bf16_t from_float(float value) {
  const uint32_t u = float_bits(value);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  return {static_cast<uint16_t>(select((u & ~detail::kSignMask) > detail::kFloatInf, nan, rounded))};
}

template <>
FI_INLINE f16_t from_float(float value) {
  return {static_cast<uint16_t>(detail::encode<5, 10>(value, 0x7e00u, 0x7c00u))};
}

template <>
FI_INLINE e4m3_t from_float(float value) {
  return {static_cast<uint8_t>(detail::encode<4, 3>(value, 0x7fu, 0x7eu))};
}

template <>
FI_INLINE e5m2_t from_float(float value) {
  return {static_cast<uint8_t>(detail::encode<5, 2>(value, 0x7fu, 0x7bu))};
}

}  // namespace fi::cpu
