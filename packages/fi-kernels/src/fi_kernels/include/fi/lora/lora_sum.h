// Parameters of lora_sum, shared by launcher, CPU and device code.
#pragma once
#include "fi/tables.h"
#include "fi/types.h"

namespace fi {

// out[t] += sum over the pairs j of token t, in order, of weights[j] x[rows[j]], for tokens that have an adapter.
// Others are not touched. Strides are in elements.
struct LoraSumParams {
  void* out;             // [token_count, width]
  const void* x;         // [.., width]
  IndexTable tokens;     // [count]; none: pair j is of token j / top_k
  IndexTable adapters;   // [token_count]; negative: none
  const float* weights;  // [count]; null: ones
  const int32_t* rows;   // [count], negative: nothing is added; null: row j
  int64_t out_row_stride, x_row_stride;
  int32_t count, token_count, top_k, width;

  FI_HOST_DEVICE int32_t row_of(int32_t pair) const { return rows ? rows[pair] : pair; }
  FI_HOST_DEVICE float weight_of(int32_t pair) const { return weights ? weights[pair] : 1.f; }
};

}  // namespace fi
