// Parameters of the residual-add RMSNorm that also quantises by blocks, shared by launcher and device code.
#pragma once
#include "fi/norm/rmsnorm.h"

namespace fi {

constexpr int kQuantBlock = 128;            // elements that share a scale
constexpr float kQuantMax = 448.f;          // largest e4m3
constexpr float kSmallestMaximum = 1e-10f;  // of a block's magnitudes, as far as its scale is concerned

// norm.out receives the norm rounded to its dtype; of those values, out = value / scale and
// scale = max(|values of the block|) / 448, so that value = out * scale.
struct RmsnormBlockQuantParams {
  RmsnormParams norm;
  void* out;           // e4m3 [rows, d]
  float* block_scale;  // [d / 128, scale_pitch]: element [block, row]
  int64_t quant_row;   // stride of out
  int64_t scale_pitch;
};

}  // namespace fi
