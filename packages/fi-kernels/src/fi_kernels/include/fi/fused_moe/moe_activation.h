// Parameters of moe_activation, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/fused_moe/expert_activation.h"

namespace fi {

// out[r, i] = act(u, g) * quant, where u = x[r, i] + bias[e, i] and, if gated, g = x[r, width + i] + bias[e, width + i]
// for rows r of expert e; delta[r] is added to both, the gate's first. Rows from offsets[experts] on are not written.
// Strides are in elements.
struct MoeActivationParams {
  void* out;               // [rows, width]
  float* out_scale;        // [rows, width / 128], contiguous: out is divided by it; null: none
  const void* x;           // [rows, width], gated [rows, 2 width]
  const void* bias;        // [experts, width], gated [experts, 2 width], of the type of x or fp32; null: none
  const void* delta;       // [rows, width], gated [rows, 2 width], of the type of x, columns in order; null: none
  const int32_t* offsets;  // [experts + 1]
  const int32_t* columns;  // [width], gated [2 width]: where x and bias hold column i; null: at i
  const float *alpha, *beta, *limit;  // [experts]; null: the constants
  const float* quant;                 // [1] or [experts]; null: 1
  int64_t out_row_stride, x_row_stride, bias_row_stride, delta_row_stride;
  int32_t width, experts, rows;
  int32_t quant_stride, bias_is_float;
  ExpertConstants constants;
  Divisor threads_per_row;
};

}  // namespace fi
