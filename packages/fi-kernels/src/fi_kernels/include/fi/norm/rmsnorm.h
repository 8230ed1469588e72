// Parameters of the rmsnorm kernels, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// x: [rows, heads, d]; s = x + residual where there is one; out = s / sqrt(mean(s^2) + eps) * (weight + weight_bias),
// divided by *scale when out is fp8. Strides in elements; the innermost is 1.
struct RmsnormParams {
  void* out;
  const void* input;
  void* residual;      // null: none; receives s rounded
  const void* weight;  // [d]
  const float* scale;  // one float; read for fp8 out only
  int64_t out_row, out_head, input_row, input_head, residual_row;
  int32_t rows;  // rows * heads
  int32_t d;
  Divisor heads;
  float eps, weight_bias, inverse_d;
};

}  // namespace fi
