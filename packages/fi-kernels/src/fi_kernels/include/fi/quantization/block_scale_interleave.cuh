// block_scale_interleave on sm_80 and later: a thread copies some columns of four rows of a tile of 128.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/quantization/block_scale_interleave.h"

namespace fi {

// Two lanes take neighbouring rows and 16 pairs of lanes neighbouring columns: each row is read in long pieces, and two
// lanes store 32 consecutive bytes. kColumns is 4, with loads of single elements, or what a load of 16 bytes holds.
template <class T, int kColumns>
FI_DEVICE void block_scale_interleave(const BlockScaleInterleaveParams& p) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, pair = divide(index / 2, p.chunks_per_row);
  const uint32_t column = (index / 2 - pair * p.chunks_per_row.value) * kColumns, strip = pair / 16;
  const uint32_t batch = divide(strip, p.strips), row_of_tile = pair % 16 * 2 + index % 2;
  pdl_wait();
  pdl_launch_dependents();
  if (index >= p.chunks) return;
  const int32_t first_row = static_cast<int32_t>((strip - batch * p.strips.value) * 128 + row_of_tile);
  Vec<T, kColumns> x[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int32_t row = first_row + 32 * j;
    const T* input = static_cast<const T*>(p.input) + (static_cast<int64_t>(batch) * p.rows + row) * p.columns + column;
    x[j] = {};
    if constexpr (kColumns > 4) {
      if (row < p.rows) x[j] = load<T, kColumns>(input);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (row < p.rows && column + i < p.columns) x[j].v[i] = input[i];
    }
  }
  T* out = static_cast<T*>(p.out) + static_cast<int64_t>(strip) * p.padded_columns * 128 + row_of_tile * 16;
#pragma unroll
  for (int t = 0; t < kColumns / 4; ++t) {
    constexpr int rows = 4 / sizeof(T);  // that 16 bytes hold
#pragma unroll
    for (int j = 0; j < 4; j += rows) {
      Vec<T, 4 * rows> y;
#pragma unroll
      for (int i = 0; i < 4 * rows; ++i) y.v[i] = x[j + i / 4].v[4 * t + i % 4];
      store(out + (column / 4 + t) * 512 + 4 * j, y);
    }
  }
}

}  // namespace fi
