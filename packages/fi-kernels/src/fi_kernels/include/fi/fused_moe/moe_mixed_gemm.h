// Parameters of moe_mixed_gemm, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/gemm/gemm.h"
#include "fi/quantization/scale_layout.h"

namespace fi {

// Formats of weights. The values are those of fi_core.fused_moe.ops.
enum MixedFormat : int32_t {
  kMxfp4 = 0,  // e2m1, two a byte, and ue8m0 scales of 32
  kNvfp4 = 1,  // e2m1 and e4m3 scales of 16
  kInt4 = 2,   // signed, two a byte, and bf16 scales of 128
  kMxfp8 = 3,  // e4m3 and ue8m0 scales of 32
};
FI_HOST_DEVICE constexpr int32_t values_per_byte(MixedFormat f) { return f == kMxfp8 ? 1 : 2; }
FI_HOST_DEVICE constexpr int32_t scale_block(MixedFormat f) { return f == kNvfp4 ? 16 : f == kInt4 ? 128 : 32; }

// out[r, j] = alpha[e] * dot(x[rows[r]], weight[e, j]) for rows r of expert e, weights times the scales of their
// blocks. `problem` has m rows of out, n, k, batch = experts and row_groups; strides of b in bytes.
struct MoeMixedGemmParams {
  GemmProblem problem;
  const int32_t* rows;  // [m]: rows of x; null: as they are
  const void* scales;   // [experts, n, scale_columns] in `layout`; each expert has scale_stride of them
  const float* alpha;   // [experts] or [1]; null: 1
  int64_t scale_stride;
  int32_t scale_columns, layout;  // padded columns of the 128x4 layout
  int32_t alpha_stride;
  int32_t group_m;
};

}  // namespace fi
