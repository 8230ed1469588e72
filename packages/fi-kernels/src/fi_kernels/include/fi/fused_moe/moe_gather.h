// Parameters of moe_gather, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// out[positions[t, j]] = x[t] for positions[t, j] >= 0: copied with the scales of blocks, or quantized to e4m3 with a
// scale for each 128 columns. Strides are in elements, of out and x in bytes.
struct MoeGatherParams {
  void* out;                 // [rows, columns]
  float* out_scale;          // [rows, blocks], contiguous; null: none
  const void* x;             // [tokens, columns]
  const float* x_scale;      // [tokens, blocks]; null: none
  const int32_t* positions;  // [tokens, top_k], contiguous
  int64_t out_row_bytes, x_row_bytes, x_scale_row_stride, x_scale_block_stride;
  int32_t blocks, top_k;
  uint32_t threads;  // that work: tokens * threads_per_row.value
  Divisor threads_per_row;
};

}  // namespace fi
