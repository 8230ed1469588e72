// Products of dense float blocks on the CPU.
#pragma once
#include <cstdint>

#include "fi/cpu/target.h"

namespace fi::cpu {

constexpr int64_t kPad = 16;  // row lengths of blocks are multiples of it
constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// An operand whose element (m, k) is data[m * row + k * step]: rows or columns of a block.
struct Strided {
  const float* data;
  int64_t row, step;
};

// c = a b, or c += a b: a [rows, depth], b [depth, columns], c [rows, columns]; columns is a multiple of kPad.
// Of dots: c = a b^T with b [columns, depth]; any number of columns, depth is a multiple of kPad.
struct Product {
  Strided a;
  const float* b;
  float* c;
  int64_t b_pitch, c_pitch, rows, columns, depth;
  bool add;
};

namespace detail {

// kRows x (kVecs * kWidth) of c, in registers.
template <int kWidth, int kRows, int kVecs>
FI_INLINE void multiply_tile(const Product& p, int64_t m0, int64_t n0) {
  typedef float Lanes __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
  const float* a = p.a.data + m0 * p.a.row;
  const float* b = p.b + n0;
  float* c = p.c + m0 * p.c_pitch + n0;
  Lanes sum[kRows][kVecs];
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kVecs; ++n)
      sum[m][n] = p.add ? *reinterpret_cast<const Lanes*>(c + m * p.c_pitch + n * kWidth) : Lanes{};
  for (int64_t k = 0; k < p.depth; ++k) {
    Lanes right[kVecs];
    for (int n = 0; n < kVecs; ++n) right[n] = *reinterpret_cast<const Lanes*>(b + k * p.b_pitch + n * kWidth);
    for (int m = 0; m < kRows; ++m) {
      const float left = a[m * p.a.row + k * p.a.step];
      for (int n = 0; n < kVecs; ++n) sum[m][n] += left * right[n];
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kVecs; ++n) *reinterpret_cast<Lanes*>(c + m * p.c_pitch + n * kWidth) = sum[m][n];
}

template <int kWidth, int kVecs>
FI_INLINE void multiply_columns(const Product& p, int64_t& n) {
  constexpr int kRows = 4;
  for (; n + kVecs * kWidth <= p.columns; n += kVecs * kWidth) {
    int64_t m = 0;
    for (; m + kRows <= p.rows; m += kRows) multiply_tile<kWidth, kRows, kVecs>(p, m, n);
    for (; m < p.rows; ++m) multiply_tile<kWidth, 1, kVecs>(p, m, n);
  }
}

template <int kWidth, int kVecs>
FI_INLINE void multiply(const Product& p) {
  int64_t n = 0;
  multiply_columns<kWidth, kVecs>(p, n);
  if constexpr (kVecs * kWidth > kPad) multiply_columns<kWidth, kPad / kWidth>(p, n);
}

template <int kWidth>
struct LaneSum {
  typedef float Lanes __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
  typedef float Half __attribute__((vector_size(kWidth * 2), aligned(4), may_alias));
  FI_INLINE static float of(const Lanes& x) {
    const Half* halves = reinterpret_cast<const Half*>(&x);
    return LaneSum<kWidth / 2>::of(halves[0] + halves[1]);
  }
};
template <>
struct LaneSum<2> {
  typedef float Lanes __attribute__((vector_size(8), aligned(4), may_alias));
  FI_INLINE static float of(const Lanes& x) { return x[0] + x[1]; }
};

// kRows x kColumns of c[m][n] = dot(a_m, b_n): enough independent sums to hide the latency of an FMA.
template <int kWidth, int kRows, int kColumns>
FI_INLINE void dots_tile(const Product& p, int64_t m0, int64_t n0) {
  typedef typename LaneSum<kWidth>::Lanes Lanes;
  const float *a = p.a.data + m0 * p.a.row, *b = p.b + n0 * p.b_pitch;
  Lanes sum[kRows][kColumns] = {};
  for (int64_t k = 0; k < p.depth; k += kWidth)
    for (int n = 0; n < kColumns; ++n) {
      const Lanes right = *reinterpret_cast<const Lanes*>(b + n * p.b_pitch + k);
      for (int m = 0; m < kRows; ++m) sum[m][n] += *reinterpret_cast<const Lanes*>(a + m * p.a.row + k) * right;
    }
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kColumns; ++n) p.c[(m0 + m) * p.c_pitch + n0 + n] = LaneSum<kWidth>::of(sum[m][n]);
}

template <int kWidth, int kRows>
FI_INLINE void dots_rows(const Product& p, int64_t& m) {
  constexpr int kColumns = 8 / kRows < 1 ? 1 : 8 / kRows;
  for (; m + kRows <= p.rows; m += kRows) {
    int64_t n = 0;
    for (; n + kColumns <= p.columns; n += kColumns) dots_tile<kWidth, kRows, kColumns>(p, m, n);
    for (; n < p.columns; ++n) dots_tile<kWidth, kRows, 1>(p, m, n);
  }
}

// c[m][n] = dot(a_m, b_n) along rows: neither operand is transposed.
template <int kWidth>
FI_INLINE void dots(const Product& p) {
  int64_t m = 0;
  dots_rows<kWidth, 4>(p, m);
  dots_rows<kWidth, 1>(p, m);
}

}  // namespace detail

// One version a level, with vectors as wide as its registers: GCC splits wider ones badly (16 lanes on x86-64-v3:
// 2 GFLOP/s, 8 lanes: 100; 16 lanes on v4: 200. Zen 5, one thread, 64 x 128 x 128).
#if FI_HAS_LEVELS
__attribute__((target("arch=x86-64-v4"))) inline void multiply(const Product& p) { detail::multiply<16, 4>(p); }
__attribute__((target("arch=x86-64-v4"))) inline void dots(const Product& p) { detail::dots<16>(p); }
__attribute__((target("arch=x86-64-v3"))) inline void multiply(const Product& p) { detail::multiply<8, 2>(p); }
__attribute__((target("arch=x86-64-v3"))) inline void dots(const Product& p) { detail::dots<8>(p); }
#define FI_ANY_LEVEL __attribute__((target("default")))
#else
#define FI_ANY_LEVEL
#endif
FI_ANY_LEVEL inline void multiply(const Product& p) { detail::multiply<4, 2>(p); }
FI_ANY_LEVEL inline void dots(const Product& p) { detail::dots<4>(p); }
#undef FI_ANY_LEVEL

}  // namespace fi::cpu
