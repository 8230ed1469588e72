// block_scale_interleave on sm_80 and later: a thread copies some columns of four rows of a tile of 128.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/quantization/block_scale_interleave.h"

namespace fi {

// Lanes that take neighbouring rows; the others of a warp take neighbouring columns. 4 are best
// (docs/notes/quantization-speed.md).
constexpr uint32_t kInterleaveLanes = 4;

// Word: holds the scales of four neighbouring columns, of type T. kWords: of a row that a thread copies, those of 16
// bytes; or 1, with loads of single scales.
template <class T, class Word, int kWords>
FI_DEVICE void block_scale_interleave(const BlockScaleInterleaveParams& p) {
  static_assert(sizeof(Word) == 4 * sizeof(T), "four columns");
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, chunk = index / kInterleaveLanes;
  const uint32_t rows = divide(chunk, p.chunks_per_row), column = (chunk - rows * p.chunks_per_row.value) * kWords * 4;
  const uint32_t strip = rows * kInterleaveLanes / 32, batch = divide(strip, p.strips);
  const uint32_t row_of_tile = rows * kInterleaveLanes % 32 + index % kInterleaveLanes;
  pdl_wait();
  pdl_launch_dependents();
  if (index >= p.chunks) return;
  const int32_t first_row = static_cast<int32_t>((strip - batch * p.strips.value) * 128 + row_of_tile);
  Vec<Word, kWords> x[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int32_t row = first_row + 32 * j;
    const T* input = static_cast<const T*>(p.input) + (static_cast<int64_t>(batch) * p.rows + row) * p.columns + column;
    x[j] = {};
    if constexpr (kWords > 1) {
      if (row < p.rows) x[j] = load<Word, kWords>(reinterpret_cast<const Word*>(input));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (row < p.rows && column + i < p.columns) x[j].v[0] |= Word{input[i]} << (8 * sizeof(T) * i);
    }
  }
  T* out = static_cast<T*>(p.out) + static_cast<int64_t>(strip) * p.padded_columns * 128 + row_of_tile * 16;
#pragma unroll
  for (int t = 0; t < kWords; ++t) {
    constexpr int rows = 16 / sizeof(Word);
#pragma unroll
    for (int j = 0; j < 4; j += rows) {
      Vec<Word, rows> y;
#pragma unroll
      for (int i = 0; i < rows; ++i) y.v[i] = x[j + i].v[t];
      store(reinterpret_cast<Word*>(out + (column / 4 + t) * 512 + 4 * j), y);
    }
  }
}

}  // namespace fi
