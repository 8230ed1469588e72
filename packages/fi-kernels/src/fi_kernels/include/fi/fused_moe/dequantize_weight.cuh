// Eight neighbouring weights of a row, dequantized to pairs of 16-bit floats (0, 4), (1, 5), (2, 6), (3, 7) times a
// scale.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/fused_moe/moe_mixed_gemm.h"

namespace fi {

FI_DEVICE unsigned multiply_pair(unsigned x, unsigned y, __nv_bfloat16) {
  const __nv_bfloat162 z =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(x), reinterpret_cast<const __nv_bfloat162&>(y));
  return reinterpret_cast<const unsigned&>(z);
}
FI_DEVICE unsigned multiply_pair(unsigned x, unsigned y, __half) {
  const __half2 z = __hmul2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(y));
  return reinterpret_cast<const unsigned&>(z);
}
FI_DEVICE unsigned pair_of(float x, __nv_bfloat16) {
  const __nv_bfloat162 z = __float2bfloat162_rn(x);
  return reinterpret_cast<const unsigned&>(z);
}
FI_DEVICE unsigned pair_of(float x, __half) {
  const __half2 z = __float2half2_rn(x);
  return reinterpret_cast<const unsigned&>(z);
}

// The bits of e2m1 are those of the exponent's lowest two and the mantissa's highest of a bf16 of 2^-126 of the value,
// or of a half of 2^-14. In bf16 the scale restores 2^100 of that, and the sums 2^26: together they would overflow.
template <class T>
struct E2m1Place;
template <>
struct E2m1Place<__nv_bfloat16> {
  static constexpr int kBit = 6;
  static constexpr unsigned kMagnitude = 0x01c001c0u;
  static constexpr float kScale = 0x1p100f, kSum = 0x1p26f;
};
template <>
struct E2m1Place<__half> {
  static constexpr int kBit = 9;
  static constexpr unsigned kMagnitude = 0x0e000e00u;
  static constexpr float kScale = 0x1p14f, kSum = 1.f;
};

template <MixedFormat kFormat, class T>
constexpr float kSumFactor = kFormat == kMxfp4 || kFormat == kNvfp4 ? E2m1Place<T>::kSum : 1.f;

template <int kShift>
FI_DEVICE unsigned shifted(unsigned x) {
  if constexpr (kShift >= 0)
    return x << kShift;
  else
    return x >> -kShift;
}

template <int kNibble, class T>
FI_DEVICE unsigned dequantize_e2m1(unsigned word) {
  return (shifted<E2m1Place<T>::kBit - 4 * kNibble>(word) & E2m1Place<T>::kMagnitude) |
         (shifted<12 - 4 * kNibble>(word) & 0x80008000u);
}
// 2^7 + (n + 8), exact in bf16, or 2^10 + (n + 8) in half, minus 2^7 + 8 or 2^10 + 8.
template <int kNibble>
FI_DEVICE unsigned dequantize_int4(unsigned word, __nv_bfloat16) {
  const unsigned x = (((word >> 4 * kNibble) & 0x000f000fu) ^ 0x00080008u) | 0x43004300u, offset = 0x43084308u;
  const __nv_bfloat162 y =
      __hsub2(reinterpret_cast<const __nv_bfloat162&>(x), reinterpret_cast<const __nv_bfloat162&>(offset));
  return reinterpret_cast<const unsigned&>(y);
}
template <int kNibble>
FI_DEVICE unsigned dequantize_int4(unsigned word, __half) {
  const unsigned x = (((word >> 4 * kNibble) & 0x000f000fu) ^ 0x00080008u) | 0x64006400u, offset = 0x64086408u;
  const __half2 y = __hsub2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(offset));
  return reinterpret_cast<const unsigned&>(y);
}

// words: the eight weights, one word, or two of 8-bit weights.
template <MixedFormat kFormat, class T>
FI_DEVICE void dequantize_weights(const unsigned (&words)[2], unsigned scale, unsigned (&out)[4]) {
  if constexpr (kFormat == kMxfp4 || kFormat == kNvfp4) {
    out[0] = dequantize_e2m1<0, T>(words[0]);
    out[1] = dequantize_e2m1<1, T>(words[0]);
    out[2] = dequantize_e2m1<2, T>(words[0]);
    out[3] = dequantize_e2m1<3, T>(words[0]);
  } else if constexpr (kFormat == kInt4) {
    out[0] = dequantize_int4<0>(words[0], T());
    out[1] = dequantize_int4<1>(words[0], T());
    out[2] = dequantize_int4<2>(words[0], T());
    out[3] = dequantize_int4<3>(words[0], T());
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned bytes = __byte_perm(words[0], words[1], i ? 0x7362 : 0x5140);
      out[2 * i] = dequantize_pair(bytes & 0xffffu, __nv_fp8_e4m3(), T());
      out[2 * i + 1] = dequantize_pair(bytes >> 16, __nv_fp8_e4m3(), T());
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = multiply_pair(out[i], scale, T());
}

// 2^(code - 127); NaN for 255.
FI_DEVICE float ue8m0_to_float(unsigned code) {
  return code == 255 ? __int_as_float(0x7fc00000) : __uint_as_float(code ? code << 23 : 0x00400000u);
}

// A stored scale as a pair of factors for dequantize_weights; beyond the range of T they become the largest.
template <MixedFormat kFormat, class T>
FI_DEVICE unsigned scale_pair(unsigned stored) {
  if constexpr (kFormat == kInt4) {
    return pair_of(__uint_as_float(stored << 16), T());
  } else {
    float scale;
    if constexpr (kFormat == kNvfp4) {
      __nv_fp8_e4m3 x;
      x.__x = static_cast<__nv_fp8_storage_t>(stored);
      scale = to_float(x);
    } else {
      scale = ue8m0_to_float(stored);
    }
    if constexpr (kFormat != kMxfp8) scale *= E2m1Place<T>::kScale;
    constexpr float most = sizeof(T) == 2 && kIsSame<T, __half> ? 32768.f : 0x1p127f;
    return pair_of(scale > most ? most : scale, T());
  }
}

}  // namespace fi
