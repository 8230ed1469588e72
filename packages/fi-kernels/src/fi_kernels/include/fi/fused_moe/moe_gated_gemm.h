// Parameters of moe_gated_gemm, shared by launcher and device code.
#pragma once
#include "fi/gemm/gemm_sm90.h"

namespace fi {

// For rows r of expert e: with u = dot(x[r], weight[e, i]) and g = dot(x[r], weight[e, width + i]), of e4m3 values
// times scales of 128 x and 128 x 128 weights, y[i] = silu(g) u is stored as e4m3 out[r, i] = y[i] / out_scale[r, i /
// 128], where a scale is the largest |y| of its 128, or 1e-10, over 448. Rows of no expert are not written.
//
// The problem is that of u and g: n is 2 width, and out is [rows, width].
struct MoeGatedGemmParams {
  GemmSm90Params gemm;
  float* out_scale;  // [rows, width / 128], contiguous
};

}  // namespace fi
