// Parameters of block_scale_interleave, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/quantization/scale_layout.h"

namespace fi {

// out holds the scales of input in the 128x4 layout, padded with zeros.
struct BlockScaleInterleaveParams {
  void* out;          // [batch, padded_rows, padded_columns] in the 128x4 layout
  const void* input;  // [batch, rows, columns], contiguous
  int32_t rows, columns, padded_columns;
  int64_t chunks;          // of a thread: some columns of rows r, r + 32, r + 64, r + 96
  Divisor chunks_per_row;  // of padded_columns
  Divisor strips;          // of 128 rows, in a matrix
};

}  // namespace fi
