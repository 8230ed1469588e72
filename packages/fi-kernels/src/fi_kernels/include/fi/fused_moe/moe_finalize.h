// Parameters of moe_finalize, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// out[t] = sum over j, in order, of weights[t, j] (y[r] + bias[e]) for the slots of token t with a row
// r = positions[t, j] >= 0, whose expert e has it. Strides are in elements.
struct MoeFinalizeParams {
  void* out;                 // [tokens, width]
  const void* y;             // [rows, width]
  const int32_t* positions;  // [tokens, top_k], contiguous
  const void* weights;       // [tokens, top_k], fp32 or bf16; null: ones
  const int32_t* offsets;    // [experts + 1]: the rows of each expert
  const void* bias;          // [experts, width], of the type of y or fp32; null: none
  const int32_t* columns;    // [width]: where y and bias hold column i; null: at i
  int64_t out_row_stride, y_row_stride, bias_row_stride, weights_token_stride, weights_slot_stride;
  int32_t width, top_k, experts;
  int32_t bias_is_float, weights_are_float;
  uint32_t threads;  // that work: tokens * threads_per_row.value
  Divisor threads_per_row;
};

}  // namespace fi
