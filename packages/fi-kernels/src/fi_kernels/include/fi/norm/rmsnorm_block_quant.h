// Parameters of residual-add RMSNorm with a block-quantized fp8 output, shared by launcher and device code.
#pragma once
#include "fi/e4m3_block.h"
#include "fi/norm/rmsnorm.h"

namespace fi {

constexpr int kQuantBlock = 128;  // elements that share a scale

// norm.out receives the norm, rounded to its dtype. Those rounded values are quantized: scale = max(|block|) / 448 and
// out = value / scale, so value = out * scale.
struct RmsnormBlockQuantParams {
  RmsnormParams norm;
  void* out;           // e4m3 [rows, d]
  float* block_scale;  // [d / 128, scale_pitch]: element [block, row]
  int64_t out_row_stride;
  int64_t scale_pitch;
};

}  // namespace fi
