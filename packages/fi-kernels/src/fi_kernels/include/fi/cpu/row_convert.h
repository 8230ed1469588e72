// Converts rows of any dtype to and from float, so that CPU kernels are compiled for float rows only.
// One conversion loop per dtype, not one kernel per dtype: a module compiles in about a second, and a row stays in L1.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>

#include "fi/cpu/convert.h"
#include "fi/cpu/parallel.h"
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

#if FI_HAS_LEVELS
// Vectors by one instruction, where integer code takes about ten. 4: the rounding mode of MXCSR; 0: to nearest even.
typedef short Halves8 __attribute__((vector_size(16)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef short Halves16 __attribute__((vector_size(32)));
typedef float Floats16 __attribute__((vector_size(64)));
__attribute__((target("arch=x86-64-v4"))) inline void load_f16(const void* src, float* dst, int64_t n) {
  const auto* p = static_cast<const f16_t*>(src);
  int64_t i = 0;
  for (Halves16 from; i + 16 <= n; i += 16) {
    std::memcpy(&from, p + i, sizeof from);
    const Floats16 to = __builtin_ia32_vcvtph2ps512_mask(from, Floats16{}, -1, 4);
    std::memcpy(dst + i, &to, sizeof to);
  }
  for (; i < n; ++i) dst[i] = to_float(p[i]);
}
__attribute__((target("arch=x86-64-v4"))) inline void store_f16(const float* src, void* dst, int64_t n) {
  auto* p = static_cast<f16_t*>(dst);
  int64_t i = 0;
  for (Floats16 from; i + 16 <= n; i += 16) {
    std::memcpy(&from, src + i, sizeof from);
    const Halves16 to = __builtin_ia32_vcvtps2ph512_mask(from, 0, Halves16{}, -1);
    std::memcpy(p + i, &to, sizeof to);
  }
  for (; i < n; ++i) p[i] = from_float<f16_t>(src[i]);
}
__attribute__((target("arch=x86-64-v3"))) inline void load_f16(const void* src, float* dst, int64_t n) {
  const auto* p = static_cast<const f16_t*>(src);
  int64_t i = 0;
  for (Halves8 from; i + 8 <= n; i += 8) {
    std::memcpy(&from, p + i, sizeof from);
    const Floats8 to = __builtin_ia32_vcvtph2ps256(from);
    std::memcpy(dst + i, &to, sizeof to);
  }
  for (; i < n; ++i) dst[i] = to_float(p[i]);
}
__attribute__((target("arch=x86-64-v3"))) inline void store_f16(const float* src, void* dst, int64_t n) {
  auto* p = static_cast<f16_t*>(dst);
  int64_t i = 0;
  for (Floats8 from; i + 8 <= n; i += 8) {
    std::memcpy(&from, src + i, sizeof from);
    const Halves8 to = __builtin_ia32_vcvtps2ph256(from, 0);
    std::memcpy(p + i, &to, sizeof to);
  }
  for (; i < n; ++i) p[i] = from_float<f16_t>(src[i]);
}
__attribute__((target("default"))) inline void load_f16(const void* src, float* dst, int64_t n) {
  load<f16_t>(src, dst, n);
}
__attribute__((target("default"))) inline void store_f16(const float* src, void* dst, int64_t n) {
  store<f16_t>(src, dst, n);
}
#else
inline void load_f16(const void* src, float* dst, int64_t n) { load<f16_t>(src, dst, n); }
inline void store_f16(const float* src, void* dst, int64_t n) { store<f16_t>(src, dst, n); }
#endif

}  // namespace detail

// NOTE: GCC does not emit the resolver of a versioned function whose address alone is taken; a call makes it do so.
inline LoadRow row_loader(DType d) {
  if (d == kBF16) return detail::load<bf16_t>;
  if (d == kF16) return [](const void* src, float* dst, int64_t n) { detail::load_f16(src, dst, n); };
  if (d == kF32) return detail::load<float>;
  if (d == kE4M3) return detail::load<e4m3_t>;
  if (d == kE5M2) return detail::load<e5m2_t>;
  raise("TypeError", "no CPU kernel reads %s", d.str().c_str());
}

inline StoreRow row_storer(DType d) {
  if (d == kBF16) return detail::store<bf16_t>;
  if (d == kF16) return [](const float* src, void* dst, int64_t n) { detail::store_f16(src, dst, n); };
  if (d == kF32) return detail::store<float>;
  if (d == kE4M3) return detail::store<e4m3_t>;
  if (d == kE5M2) return detail::store<e5m2_t>;
  raise("TypeError", "no CPU kernel writes %s", d.str().c_str());
}

// The floats of a row: those of fp32 in place, others converted to scratch.
inline const float* floats_of(DType d, const void* src, float* scratch, int64_t n) {
  if (d == kF32) return static_cast<const float*>(src);
  row_loader(d)(src, scratch, n);
  return scratch;
}

// Calls f(row, scratch) for every row, in parallel. work: elements that a row costs; floats: the size of scratch, which
// belongs to the thread and is not initialized.
template <class F>
void for_rows(int64_t rows, int64_t work, int64_t floats, F&& f) {
  parallel_for(rows, 16384 / std::clamp<int64_t>(work, 1, 16384), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(floats)]);
    for (int64_t row = begin; row < end; ++row) f(row, scratch.get());
  });
}

// Calls f(row, first, n, scratch) for pieces [first, first + n) of every row, in parallel: n is at most kPiece, so that
// a few buffers of a piece (4 KB each) stay in L1. scratch: `buffers` of them, one after another, kPiece floats each.
constexpr int64_t kPiece = 1024;

template <class F>
void for_pieces(int64_t rows, int64_t width, int64_t buffers, F&& f) {
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  for_rows(rows * pieces, 2 * buffers * std::min(width, kPiece), buffers * kPiece, [&](int64_t index, float* scratch) {
    const int64_t first = index % pieces * kPiece;
    f(index / pieces, first, std::min(kPiece, width - first), scratch);
  });
}

}  // namespace fi::cpu
