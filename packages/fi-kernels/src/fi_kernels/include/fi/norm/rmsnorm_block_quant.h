// Parameters of residual-add RMSNorm with a block-quantized fp8 output, shared by launcher and device code.
#pragma once
#include "fi/norm/rmsnorm.h"

namespace fi {

constexpr int kQuantBlock = 128;        // elements that share a scale
constexpr float kE4m3Max = 448.f;       // largest finite e4m3 value
constexpr float kMinBlockMax = 1e-10f;  // lower bound of a block's maximum, so that no scale is zero

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
