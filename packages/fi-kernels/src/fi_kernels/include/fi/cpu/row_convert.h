// Converts rows of any dtype to and from float, so that CPU kernels are compiled for float rows only.
// One conversion loop per dtype, not one kernel per dtype: a module compiles in about a second, and a row stays in L1.
#pragma once
#include "fi/cpu/convert.h"
#include "fi/cpu/target.h"
#include "fi/host/tensor.h"

namespace fi::cpu {

using LoadRow = void (*)(const void* src, float* dst, int64_t n);
using StoreRow = void (*)(const float* src, void* dst, int64_t n);

namespace detail {

template <class T>
FI_CLONES void load(const void* src, float* dst, int64_t n) {
  const T* p = static_cast<const T*>(src);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dst[i] = to_float(p[i]);
}
template <class T>
FI_CLONES void store(const float* src, void* dst, int64_t n) {
  T* p = static_cast<T*>(dst);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) p[i] = from_float<T>(src[i]);
}

}  // namespace detail

inline LoadRow row_loader(DType d) {
  if (d == kBF16) return detail::load<bf16_t>;
  if (d == kF16) return detail::load<f16_t>;
  if (d == kF32) return detail::load<float>;
  if (d == kE4M3) return detail::load<e4m3_t>;
  if (d == kE5M2) return detail::load<e5m2_t>;
  raise("TypeError", "no CPU kernel reads %s", d.str().c_str());
}

inline StoreRow row_storer(DType d) {
  if (d == kBF16) return detail::store<bf16_t>;
  if (d == kF16) return detail::store<f16_t>;
  if (d == kF32) return detail::store<float>;
  if (d == kE4M3) return detail::store<e4m3_t>;
  if (d == kE5M2) return detail::store<e5m2_t>;
  raise("TypeError", "no CPU kernel writes %s", d.str().c_str());
}

}  // namespace fi::cpu
