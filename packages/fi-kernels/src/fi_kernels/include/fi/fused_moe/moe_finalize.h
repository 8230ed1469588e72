// Parameters of moe_finalize, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

enum WeightType : int32_t { kFloatWeights = 0, kBfloat16Weights = 1, kHalfWeights = 2 };

// out[t] = sum over j, in order, of weights[t, j] (y[r] + bias[e]) for the slots of token t with a row
// r = positions[t, j] >= 0, whose expert e has it; then + added[t]. Strides are in elements.
struct MoeFinalizeParams {
  void* out;                 // [tokens, width]
  const void* y;             // [rows, width]
  const int32_t* positions;  // [tokens, top_k], contiguous; null: j tokens + t
  const void* weights;       // [tokens, top_k], fp32, bf16 or fp16; null: ones
  const void* added;         // [tokens, width], of the type of y; null: none
  const int32_t* offsets;    // [experts + 1]: the rows of each expert; rows behind the last add nothing. Null: no bias
  const void* bias;          // [experts, width], of the type of y or fp32; null: none
  const int32_t* columns;    // [width]: where y and bias hold column i; null: at i
  int64_t out_row_stride, y_row_stride, bias_row_stride, added_row_stride, weights_token_stride, weights_slot_stride;
  int32_t tokens, width, top_k, experts;
  int32_t bias_is_float;
  WeightType weight_type;
  Divisor warps_per_row;
};

}  // namespace fi
