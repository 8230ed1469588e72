// Parameters of block_dequantize, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/quantization/scale_layout.h"

namespace fi {

// out = input * scale * global_scale, in fp32 and in this order, with one rounding. Matrices of a batch have scales of
// their own, padded each.
struct BlockDequantizeParams {
  void* out;                  // [batch, rows, columns], contiguous
  const uint8_t* input;       // [batch, rows, columns]: e2m1 (two values a byte), e4m3 or e5m2
  const uint8_t* scales;      // one byte for each block, in `layout`
  const float* global_scale;  // [1]; null: 1
  int64_t input_batch_stride, input_row_stride, scale_batch_stride;  // in bytes
  int32_t rows, columns, scale_columns, block, layout;
  int64_t chunks;  // of 8 elements
  Divisor chunks_per_row, rows_per_matrix;
};

}  // namespace fi
