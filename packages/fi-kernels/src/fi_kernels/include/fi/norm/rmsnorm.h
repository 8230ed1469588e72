// Parameters of the rmsnorm kernels, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// out = s / sqrt(mean(s^2) + eps) * (weight + weight_bias), where s = x + residual, or x without a residual; an fp8 out
// is divided by *scale. x: [rows, heads, d]. Strides are in elements; the innermost stride is 1.
struct RmsnormParams {
  void* out;
  const void* input;
  void* residual;      // null: none; receives s, rounded to its dtype
  const void* weight;  // [d]
  const float* scale;  // one float; read for fp8 out only
  int64_t out_row_stride, out_head_stride, input_row_stride, input_head_stride, residual_row_stride;
  int32_t rows;  // rows * heads
  int32_t d;
  Divisor heads;
  float eps, weight_bias, inv_d;  // inv_d = 1 / d
};

}  // namespace fi
