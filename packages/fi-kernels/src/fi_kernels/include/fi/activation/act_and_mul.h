// Parameters of the gated activations, shared by launcher and device code.
#pragma once
#include "fi/activation.h"
#include "fi/divisor.h"

namespace fi {

// out[row, i] = act(input[row, i]) * input[row, h + i]. Strides are in elements; the innermost stride is 1.
struct ActAndMulParams {
  void* out;          // [rows, h]
  const void* input;  // [rows, 2 h]
  int64_t out_row_stride, input_row_stride, h;
  uint32_t vectors;  // rows * h / (elements per vector)
  Divisor vectors_per_row;
};

}  // namespace fi
