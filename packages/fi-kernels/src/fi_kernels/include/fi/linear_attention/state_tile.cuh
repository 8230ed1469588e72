// A tile of a state [rows, kK] in the registers of a warp, and what the recurrences read beside it.
#pragma once
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/linear_attention/tables.h"

namespace fi {

FI_DEVICE float number(const Numbers& numbers, int64_t i) {
  switch (numbers.type) {
    case NumberType::kF16:
      return to_float(static_cast<const __half*>(numbers.data)[i]);
    case NumberType::kBF16:
      return to_float(static_cast<const __nv_bfloat16*>(numbers.data)[i]);
    default:
      return static_cast<const float*>(numbers.data)[i];
  }
}

// log(1 + e^x), as the models have it: x itself above 20.
FI_DEVICE float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
FI_DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

constexpr int kStateLanes = 8;  // that share a row; a warp has four groups of them

// Lane l holds columns of rows l / 8 * kRows and the next, l % 8 of each 8 vectors of 16 bytes: a load of a warp reads
// 128 contiguous bytes of four rows. kKLast false: the rows are the contiguous dimension, so a vector holds kRows of
// them, and lane l has columns l % 8 of each 8. S: float or 16-bit storage.
template <class S, int kK, int kRows, bool kKLast = true>
struct StateTile {
  static constexpr int kVec = 16 / sizeof(S);  // elements of a vector
  static constexpr int kColumns = kK / kStateLanes;
  static constexpr int kWarpRows = 32 / kStateLanes * kRows;
  static_assert(kK % (kStateLanes * kVec) == 0 && (kKLast || kRows == kVec), "vectors of 16 bytes");

  float x[kRows][kColumns];

  FI_DEVICE static int lane() { return threadIdx.x % kStateLanes; }
  FI_DEVICE static int first_row() { return threadIdx.x % 32 / kStateLanes * kRows; }

  // A tile as it lies in memory, while it is on its way.
  static constexpr int kVectors = kKLast ? kColumns / kVec : kColumns, kVectorRows = kKLast ? kRows : 1;
  struct Words {
    uint4 w[kVectorRows][kVectors];

    // rows: that exist from the first row of this lane on. The others become 0. Plain loads: the lines are written back
    // soon; evict-first loads take 281.8 us instead of 276.7 for 256 requests on an H200.
    FI_DEVICE void load(const S* from, int64_t row_stride, int64_t column_stride, int rows) {
#pragma unroll
      for (int r = 0; r < kVectorRows; ++r)
#pragma unroll
        for (int c = 0; c < kVectors; ++c) {
          const int64_t at =
              kKLast ? r * row_stride + (c * kStateLanes + lane()) * kVec : (c * kStateLanes + lane()) * column_stride;
          w[r][c] = r < rows ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
        }
    }
  };

  FI_DEVICE explicit StateTile(const Words& words) {
#pragma unroll
    for (int r = 0; r < kVectorRows; ++r)
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        Vec<S, kVec> vec;
        float f[kVec];
        memcpy(&vec, &words.w[r][c], sizeof vec);
        to_float(vec, f);
#pragma unroll
        for (int e = 0; e < kVec; ++e) (kKLast ? x[r][c * kVec + e] : x[e][c]) = f[e];
      }
  }

  FI_DEVICE void store(S* to, int64_t row_stride, int64_t column_stride, int rows) const {
    if constexpr (kKLast) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < kColumns / kVec; ++c) {
          float f[kVec];
          Vec<S, kVec> vec;
#pragma unroll
          for (int e = 0; e < kVec; ++e) f[e] = x[r][c * kVec + e];
          from_float(f, vec);
          if (r < rows) fi::store(to + r * row_stride + (c * kStateLanes + lane()) * kVec, vec);
        }
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float f[kVec];
        Vec<S, kVec> vec;
#pragma unroll
        for (int r = 0; r < kRows; ++r) f[r] = x[r][c];
        from_float(f, vec);
        if (rows > 0) fi::store(to + (c * kStateLanes + lane()) * column_stride, vec);
      }
    }
  }

  // Column i of this lane.
  FI_DEVICE static int column(int i) {
    return kKLast ? (i / kVec * kStateLanes + lane()) * kVec + i % kVec : i * kStateLanes + lane();
  }

  // The elements of a row of kK, such as of q, at the columns of this lane. vectors: the row is aligned to 16 bytes.
  template <class T>
  FI_DEVICE static void load_columns(const T* row, bool vectors, float (&f)[kColumns]) {
    constexpr int kWidth = kVec * sizeof(T) <= 16 ? kVec : 16 / sizeof(T);
    if (kKLast && vectors) {
#pragma unroll
      for (int i = 0; i < kColumns; i += kWidth) {
        float part[kWidth];
        to_float(fi::load<T, kWidth>(row + column(i)), part);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) f[i + e] = part[e];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) f[i] = to_float(row[column(i)]);
    }
  }

  // Of each row the product with a vector, whose columns this lane has; all 8 lanes get the sums.
  FI_DEVICE void multiply(const float (&f)[kColumns], float (&sums)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum += x[r][i] * f[i];
      sums[r] = warp_sum(sum, kStateLanes);
    }
  }

  // Lanes 0 .. kRows - 1 of the 8 store one row's number each: those of a warp are contiguous.
  template <class T>
  FI_DEVICE static void store_rows(T* to, const float (&numbers)[kRows], int rows) {
    float mine = numbers[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) mine = lane() == r ? numbers[r] : mine;
    if (lane() < kRows && lane() < rows) to[lane()] = from_float<T>(mine);
  }
};

}  // namespace fi
