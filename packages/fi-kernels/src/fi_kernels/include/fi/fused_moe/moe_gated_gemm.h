// Parameters of moe_gated_gemm, shared by launcher and device code.
#pragma once
#include "fi/fused_moe/expert_activation.h"
#include "fi/gemm/gemm_sm90.h"

namespace fi {

// For rows r of expert e: with u = dot(x[r], weight[e, i]) + bias[e, i] and g = dot(x[r], weight[e, width + i]) +
// bias[e, width + i], out[r, i] = act(u, g). Values of e4m3 have scales of 128 x and 128 x 128 weights, and are stored
// as e4m3 with out_scale[r, i / 128], the largest |out| of its 128, or 1e-10, over 448. Rows of no expert are not
// written.
//
// The problem is that of u and g: n is 2 width, and out is [rows, width].
struct MoeGatedGemmParams {
  GemmSm90Params gemm;
  float* out_scale;    // [rows, width / 128], contiguous; null for 16 bits
  const void* bias;    // [experts, 2 width], of the type of x or fp32; null: none
  const void* delta;   // [rows, 2 width], 16 bits, of g and then of u: is added before the activation. Null: none
  const float* alpha;  // [experts]; null: the constants. So are beta and limit
  const float* beta;
  const float* limit;
  int64_t bias_row_stride, delta_row_stride;
  ExpertConstants constants;
  int32_t bias_is_float, delta_is_half;
};

}  // namespace fi
