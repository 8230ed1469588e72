// CPU kernels of the recurrences: states as fp32 rows, numbers of any dtype, and one token of a gated delta rule.
#pragma once
#include <cmath>

#include "fi/cpu/reduce.h"
#include "fi/cpu/row_convert.h"
#include "fi/tables.h"

namespace fi::cpu {

FI_INLINE float number(const Numbers& numbers, int64_t i) {
  switch (numbers.type) {
    case NumberType::kF16:
      return to_float(static_cast<const f16_t*>(numbers.data)[i]);
    case NumberType::kBF16:
      return to_float(static_cast<const bf16_t*>(numbers.data)[i]);
    default:
      return static_cast<const float*>(numbers.data)[i];
  }
}

// log(1 + e^x), as the models have it: x itself above 20.
inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

// Moves a state [rows, columns] of any dtype and strides to contiguous floats, and back.
struct StateRows {
  DType dtype;
  int64_t rows, columns, row_stride, column_stride;

  void load(const void* from, float* to) const {
    const LoadRow load_row = row_loader(dtype);
    each(static_cast<const char*>(from), [&](const char* at, int64_t i, int64_t n) { load_row(at, to + i, n); });
  }
  void store(const float* from, void* to) const {
    const StoreRow store_row = row_storer(dtype);
    each(static_cast<char*>(to), [&](char* at, int64_t i, int64_t n) { store_row(from + i, at, n); });
  }

 private:
  template <class Byte, class F>
  void each(Byte* base, F&& f) const {
    const int64_t bytes = dtype.bytes();
    for (int64_t r = 0; r < rows; ++r) {
      if (column_stride == 1) {
        f(base + r * row_stride * bytes, r * columns, columns);
      } else {
        for (int64_t c = 0; c < columns; ++c)
          f(base + (r * row_stride + c * column_stride) * bytes, r * columns + c, 1);
      }
    }
  }
};

// One token: S *= alpha (of each column); u = beta (v - S k); S += u k^T; out = S q. k and q are scaled already.
FI_CLONES inline void gated_delta_step(float* state, const float* alpha, float beta, const float* k, const float* q,
                                       const float* v, float* out, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    float* s = state + r * columns;
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) s[c] *= alpha[c];
    const float read = sum(columns, [&](int64_t c) __attribute__((always_inline)) { return s[c] * k[c]; });
    const float u = beta * (v[r] - read);
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) s[c] += u * k[c];
    out[r] = sum(columns, [&](int64_t c) __attribute__((always_inline)) { return s[c] * q[c]; });
  }
}

// Multiplies a row by `scale`, and by the inverse of its length if `normalizes`.
inline void scale_row_of_heads(float* x, int64_t n, bool normalizes, float scale) {
  float squares = 0.f;
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  if (normalizes) scale /= std::sqrt(squares + 1e-6f);
  for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

// One token: S = decay S + (dt x) b^T; out = S c.
FI_CLONES inline void selective_step(float* state, float decay, float dt, const float* x, const float* b,
                                     const float* c, float* out, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    float* s = state + r * columns;
    const float add = dt * x[r];
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) s[i] = decay * s[i] + add * b[i];
    out[r] = sum(columns, [&](int64_t i) __attribute__((always_inline)) { return s[i] * c[i]; });
  }
}

}  // namespace fi::cpu
