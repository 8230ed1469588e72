// Parameters of the layernorm kernels, shared by launcher and device code.
#pragma once
#include "fi/types.h"

namespace fi {

// x: [rows, d]; out = (x - mean) / sqrt(var + eps) * gamma + beta with the biased variance, divided by *scale when out
// is fp8. Strides in elements; the innermost is 1.
struct LayernormParams {
  void* out;
  const void* input;
  const float *gamma, *beta;  // [d]
  const float* scale;         // one float; read for fp8 out only
  int64_t out_row, input_row;
  int32_t rows, d;
  float eps, inverse_d;
};

}  // namespace fi
