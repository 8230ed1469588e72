// Conversions between storage types and float, in device code; fp8 saturates (largest finite), NaN stays NaN.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

// std::is_same_v, which NVRTC does not have.
template <class A, class B>
constexpr bool kIsSame = false;
template <class T>
constexpr bool kIsSame<T, T> = true;

FI_DEVICE float to_float(float x) { return x; }
FI_DEVICE float to_float(__half x) { return __half2float(x); }
FI_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
// Before sm_89 there is no instruction, and the emulation in cuda_fp8.h is a hundred instructions long.
FI_DEVICE float to_float(__nv_fp8_e4m3 x) {
#if __CUDA_ARCH__ >= 890
  return static_cast<float>(x);
#else
  const int magnitude = x.__x & 0x7f;  // as the upper bits of a float, subnormals included, 2^120 too small
  const float value = magnitude == 0x7f ? __int_as_float(0x7fffffff) : __int_as_float(magnitude << 20) * 0x1p120f;
  return x.__x & 0x80 ? -value : value;
#endif
}
FI_DEVICE float to_float(__nv_fp8_e5m2 x) {
#if __CUDA_ARCH__ >= 890
  return static_cast<float>(x);
#else
  return __half2float(__ushort_as_half(static_cast<unsigned short>(x.__x << 8)));  // the upper byte of a half
#endif
}

template <class T>
FI_DEVICE T from_float(float x);
template <>
FI_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
FI_DEVICE __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
FI_DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
FI_DEVICE __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float x) {
  return __nv_fp8_e4m3(x);
}
template <>
FI_DEVICE __nv_fp8_e5m2 from_float<__nv_fp8_e5m2>(float x) {
  return __nv_fp8_e5m2(x);
}

template <class T>
constexpr bool kIsFp8 = sizeof(T) == 1;

}  // namespace fi
