// Parameters of block_dequantize, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/quantization/scale_layout.h"

namespace fi {

// out = input * scale * global_scale, in fp32 and in this order.
struct BlockDequantizeParams {
  float* out;                 // [rows, columns], contiguous
  const uint8_t* input;       // [rows, columns]: e2m1 (two values a byte), e4m3 or e5m2, contiguous
  const uint8_t* scales;      // one byte for each block, in `layout`
  const float* global_scale;  // [1]; null: 1
  int32_t rows, columns, scale_columns, block, layout;
  int64_t chunks;  // of 8 elements
  Divisor chunks_per_row;
};

}  // namespace fi
