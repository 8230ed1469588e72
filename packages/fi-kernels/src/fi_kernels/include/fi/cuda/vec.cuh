// Vec<T, N>: N consecutive elements moved by one instruction (at most 16 bytes), and their float view.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/ptx/global.cuh"

namespace fi {

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(sizeof(T) * N <= 16, "one load moves at most 16 bytes");
  T v[N];
};

template <class T, int N>
FI_DEVICE Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
// By `load_once` where it is a vector of 16 bytes. again: as there.
template <class T, int N>
FI_DEVICE Vec<T, N> load_streamed(const T* p, bool again) {
  if constexpr (sizeof(Vec<T, N>) == 16) {
    const uint4 words = load_once(p, again);
    Vec<T, N> x;
    memcpy(&x, &words, sizeof x);
    return x;
  } else {
    return load<T, N>(p);
  }
}
// To global memory.
template <class T, int N>
FI_DEVICE void store(T* p, const Vec<T, N>& x) {
  if constexpr (sizeof(x) == 16) {
    uint4 words;
    memcpy(&words, &x, sizeof x);
    store_global(p, words);
  } else if constexpr (sizeof(x) == 8) {
    uint2 words;
    memcpy(&words, &x, sizeof x);
    store_global(p, words);
  } else {
    *reinterpret_cast<Vec<T, N>*>(p) = x;
  }
}
// By `store_once` where it is a vector of 16 bytes.
template <class T, int N>
FI_DEVICE void store_streamed(T* p, const Vec<T, N>& x) {
  if constexpr (sizeof(x) == 16) {
    uint4 words;
    memcpy(&words, &x, sizeof x);
    store_once(p, words);
  } else {
    store(p, x);
  }
}

// Pairs convert in one instruction where the hardware has it, and stay packed until then: an element taken out alone
// costs a register and an instruction more.
template <class T, int N>
FI_DEVICE void to_float(const Vec<T, N>& x, float (&f)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) f[i] = to_float(x.v[i]);
}
template <int N>
FI_DEVICE void to_float(const Vec<__nv_bfloat16, N>& x, float (&f)[N]) {
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      uint32_t pair;
      memcpy(&pair, &x.v[i], sizeof pair);
      f[i] = __uint_as_float(pair << 16);
      f[i + 1] = __uint_as_float(pair & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) f[i] = __bfloat162float(x.v[i]);
  }
}
template <int N>
FI_DEVICE void from_float(const float (&f)[N], Vec<__nv_bfloat16, N>& x) {
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) *reinterpret_cast<__nv_bfloat162*>(&x.v[i]) = __floats2bfloat162_rn(f[i], f[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x.v[i] = __float2bfloat16_rn(f[i]);
  }
}
template <int N>
FI_DEVICE void from_float(const float (&f)[N], Vec<__half, N>& x) {
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) *reinterpret_cast<__half2*>(&x.v[i]) = __floats2half2_rn(f[i], f[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x.v[i] = __float2half_rn(f[i]);
  }
}
template <int N>
FI_DEVICE void from_float(const float (&f)[N], Vec<float, N>& x) {
#pragma unroll
  for (int i = 0; i < N; ++i) x.v[i] = f[i];
}
template <class T, int N>
FI_DEVICE void fp8_from_float(const float (&f)[N], Vec<T, N>& x, __nv_fp8_interpretation_t format) {
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2)
      *reinterpret_cast<__nv_fp8x2_storage_t*>(&x.v[i]) =
          __nv_cvt_float2_to_fp8x2(make_float2(f[i], f[i + 1]), __NV_SATFINITE, format);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x.v[i].__x = __nv_cvt_float_to_fp8(f[i], __NV_SATFINITE, format);
  }
}
template <int N>
FI_DEVICE void from_float(const float (&f)[N], Vec<__nv_fp8_e4m3, N>& x) {
  fp8_from_float(f, x, __NV_E4M3);
}
template <int N>
FI_DEVICE void from_float(const float (&f)[N], Vec<__nv_fp8_e5m2, N>& x) {
  fp8_from_float(f, x, __NV_E5M2);
}

}  // namespace fi
