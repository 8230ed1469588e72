// Parameters of the layernorm kernels, shared by launcher and device code.
#pragma once
#include "fi/types.h"

namespace fi {

// out = (x - mean) / sqrt(var + eps) * gamma + beta with the biased variance; an fp8 out is divided by *scale.
// x: [rows, d]. Strides are in elements; the innermost stride is 1.
struct LayernormParams {
  void* out;
  const void* input;
  const float *gamma, *beta;  // [d]
  const float* scale;         // one float; read for fp8 out only
  int64_t out_row_stride, input_row_stride;
  int32_t rows, d;
  float eps, inv_d;  // inv_d = 1 / d
};

}  // namespace fi
