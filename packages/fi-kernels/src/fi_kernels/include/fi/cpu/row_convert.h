// Converts rows of any dtype to and from float, so that CPU kernels are compiled for float rows only.
// One conversion loop per dtype, not one kernel per dtype: a module compiles in about a second, and a row stays in L1.
#pragma once
#include <algorithm>
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
