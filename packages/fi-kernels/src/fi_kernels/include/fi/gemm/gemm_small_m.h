// Parameters of the Hopper GEMM for few tokens, shared by launcher and device code.
#pragma once
#include "fi/gemm/gemm_sm90.h"

namespace fi {

constexpr int kGemmSmallMSplits = 8;  // CTAs of a cluster that share a tile, at most

struct GemmSmallMParams {
  GemmSm90Params gemm;  // boxes of a and b are those of a tile
  int32_t b_constant;   // b was complete before the kernel ahead in the stream began
};

}  // namespace fi
