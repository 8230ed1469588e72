// A tile of a state [rows, kK] in the registers of a warp, and what the recurrences read beside it.
#pragma once
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/tables.h"

namespace fi {

// The loads below are predicated, without branches: no load is waited for before the next ones have been issued.

// The bits of a number of 32 or 16 bits.
FI_DEVICE uint32_t load_bits(const Numbers& numbers, int64_t i) {
  const bool wide = numbers.type == NumberType::kF32;
  uint32_t bits;
  asm volatile(
      "{\n"
      ".reg .pred wide;\n"
      "setp.ne.s32 wide, %2, 0;\n"
      "@wide ld.global.b32 %0, [%1];\n"
      "@!wide ld.global.u16 %0, [%1];\n"
      "}"
      : "=r"(bits)
      : "l"(__cvta_generic_to_global(static_cast<const char*>(numbers.data) + i * (wide ? 4 : 2))), "r"(int{wide}));
  return bits;
}
FI_DEVICE float number_of(uint32_t bits, NumberType type) {
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  const float other = __uint_as_float(type == NumberType::kF32 ? bits : bits << 16);
  return type == NumberType::kF16 ? half : other;
}
FI_DEVICE float number(const Numbers& numbers, int64_t i) { return number_of(load_bits(numbers, i), numbers.type); }

// As IndexTable::or_row.
FI_DEVICE int64_t load_index(const IndexTable& table, int64_t row, int64_t column = 0) {
  const int64_t at = (row * table.row_stride + column * table.column_stride) * (table.is_wide ? 8 : 4);
  int64_t index = row;
  asm volatile(
      "{\n"
      ".reg .pred wide, narrow;\n"
      "setp.ne.s32 wide, %2, 0;\n"
      "setp.ne.s32 narrow, %3, 0;\n"
      "@wide ld.global.b64 %0, [%1];\n"
      "@narrow ld.global.s32 %0, [%1];\n"
      "}"
      : "+l"(index)
      : "l"(__cvta_generic_to_global(static_cast<const char*>(table.data) + at)), "r"(int{table.data && table.is_wide}),
        "r"(int{table.data && !table.is_wide}));
  return index;
}

// log(1 + e^x), as the models have it: x itself above 20.
FI_DEVICE float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
FI_DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// kLanes lanes share a row, and have its vectors of 16 bytes alternately, so a load of a warp reads whole lines of 32 /
// kLanes rows. Lane l has kRows rows from l / kLanes * kRows on (or, if the caller passes such strides, every 32 /
// kLanes-th from l / kLanes on). kKLast false: the rows are the contiguous dimension, so a vector holds kRows of them,
// and the columns of a row alternate between the lanes. S: float or 16-bit storage.
template <class S, int kK, int kRows, bool kKLast = true, int kLanesOfRow = 8>
struct StateTile {
  static constexpr int kLanes = kLanesOfRow, kGroups = 32 / kLanes;
  static constexpr int kVec = 16 / sizeof(S);  // elements of a vector
  static constexpr int kColumns = kK / kLanes;
  static constexpr int kWarpRows = kGroups * kRows;
  static_assert(kK % (kLanes * kVec) == 0 && (kKLast || kRows == kVec), "vectors of 16 bytes");

  float x[kRows][kColumns];

  FI_DEVICE static int lane() { return threadIdx.x % kLanes; }
  FI_DEVICE static int group() { return threadIdx.x % 32 / kLanes; }
  FI_DEVICE static int first_row() { return group() * kRows; }

  // A tile as it lies in memory, while it is on its way.
  static constexpr int kVectors = kKLast ? kColumns / kVec : kColumns, kVectorRows = kKLast ? kRows : 1;
  struct Words {
    uint4 w[kVectorRows][kVectors];

    // Rows that all exist, or none: then the words stay as they are.
    FI_DEVICE void load_if(bool exist, const S* from, int64_t row_stride) {
#pragma unroll
      for (int r = 0; r < kVectorRows; ++r)
#pragma unroll
        for (int c = 0; c < kVectors; ++c)
          load_here_if(exist, w[r][c], from + r * row_stride + (c * kLanes + lane()) * kVec);
    }

    // rows: that exist from the first row of this lane on. The others become 0. Plain loads: the lines are written back
    // soon; evict-first loads are slower (docs/notes/linear-attention-decode.md).
    FI_DEVICE void load(const S* from, int64_t row_stride, int64_t column_stride, int rows) {
#pragma unroll
      for (int r = 0; r < kVectorRows; ++r)
#pragma unroll
        for (int c = 0; c < kVectors; ++c) {
          const int64_t at =
              kKLast ? r * row_stride + (c * kLanes + lane()) * kVec : (c * kLanes + lane()) * column_stride;
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
          if (r < rows) fi::store(to + r * row_stride + (c * kLanes + lane()) * kVec, vec);
        }
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float f[kVec];
        Vec<S, kVec> vec;
#pragma unroll
        for (int r = 0; r < kRows; ++r) f[r] = x[r][c];
        from_float(f, vec);
        if (rows > 0) fi::store(to + (c * kLanes + lane()) * column_stride, vec);
      }
    }
  }

  // Column i of this lane.
  FI_DEVICE static int column(int i) {
    return kKLast ? (i / kVec * kLanes + lane()) * kVec + i % kVec : i * kLanes + lane();
  }

  // The elements of a row of kK, such as of q, at the columns of this lane, as they lie in memory.
  template <class T>
  struct Columns {
    static constexpr int kWidth = kVec * sizeof(T) <= 16 ? kVec : 16 / sizeof(T);
    Vec<T, kWidth> v[kColumns / kWidth];

    // vectors: the row is aligned to 16 bytes.
    FI_DEVICE void load(const T* row, bool vectors) {
      if (kKLast && vectors) {
#pragma unroll
        for (int i = 0; i < kColumns / kWidth; ++i) {
          if constexpr (sizeof v[0] == 8) {
            const uint2 words = load_here(row + column(i * kWidth));
            memcpy(&v[i], &words, sizeof words);
          } else {
            v[i] = fi::load<T, kWidth>(row + column(i * kWidth));
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) v[i / kWidth].v[i % kWidth] = row[column(i)];
      }
    }
    FI_DEVICE void to_float(float (&f)[kColumns]) const {
#pragma unroll
      for (int i = 0; i < kColumns; i += kWidth) {
        float part[kWidth];
        fi::to_float(v[i / kWidth], part);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) f[i + e] = part[e];
      }
    }
  };

  // The part of a row's product with a vector that this lane has: sums of each vector of 16 bytes, which a tree adds.
  FI_DEVICE float multiply_row(int r, const float (&f)[kColumns]) const {
    constexpr int kWidth = kKLast ? kVec : kColumns, kParts = kColumns / kWidth;
    float parts[kParts];
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      parts[c] = x[r][c * kWidth] * f[c * kWidth];
#pragma unroll
      for (int e = 1; e < kWidth; ++e) parts[c] = fmaf(x[r][c * kWidth + e], f[c * kWidth + e], parts[c]);
    }
#pragma unroll
    for (int half = kParts / 2; half > 0; half /= 2)
#pragma unroll
      for (int c = 0; c < half; ++c) parts[c] += parts[c + half];
    return parts[0];
  }
  // Of each row the product with a vector, whose columns this lane has; all lanes of the row get the sums.
  FI_DEVICE void multiply(const float (&f)[kColumns], float (&sums)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum += x[r][i] * f[i];
      sums[r] = warp_sum(sum, kLanes);
    }
  }
  // The same by multiply_row, whose tree goes on over the lanes: the order of a row's additions depends on S and kK
  // only, so the bits do not depend on how many lanes share a row.
  FI_DEVICE void multiply_alike(const float (&f)[kColumns], float (&sums)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = warp_sum(multiply_row(r, f), kLanes);
  }

  // x = decay x + value f^T, with explicit roundings: each kernel gets the same bits.
  FI_DEVICE void update(float decay, const float (&value)[kRows], const float (&f)[kColumns]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kColumns; ++i) x[r][i] = fmaf(decay, x[r][i], value[r] * f[i]);
  }

  // Lanes 0 .. kRows - 1 of a group store one row's number each, `step` elements apart: those of a warp are contiguous.
  template <class T>
  FI_DEVICE static void store_rows(T* to, const float (&numbers)[kRows], int rows, int step = 1) {
    float mine = numbers[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) mine = lane() == r ? numbers[r] : mine;
    if (lane() < kRows && lane() < rows) to[lane() * step] = from_float<T>(mine);
  }
};

}  // namespace fi
