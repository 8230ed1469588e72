// Parameters of the GEMM of bf16 tokens and weights of 4 or 8 bits, shared by launcher and code of the CPU, and of fp4
// weights on Hopper.
#pragma once
#include "fi/tensor_map.h"
#include "fi/types.h"

namespace fi {

// Blocks of 16 rows of b that a warp has at most, and warps that fill stages.
constexpr int kFewBitsWarpBlocks = 4, kFewBitsLoaders = 4;

// out[i, j] = alpha * dot(a[i], values(b[j]) * scales(b[j])) + bias[j]. Strides are in elements, that of b in bytes.
struct GemmFewBitsParams {
  TensorMap map;          // of b: boxes of 128 bytes by the rows of a CTA
  void* out;              // [m, n]
  const void* a;          // [m, k], bf16
  const uint8_t* b;       // [n, k]: e4m3, or two e2m1 a byte, an even k in the lower half
  const uint8_t* scales;  // of e2m1: of groups of 16 (e4m3) or 32 k (ue8m0), in the 128x4 layout
  const float* alpha;     // null: 1
  const void* bias;       // [n], of the type of out; null: none
  int64_t out_row_stride, a_row_stride, b_row_stride;
  int32_t m, n, k;
  int32_t scale_tiles;   // tiles of 128 rows by 4 groups along k
  int32_t blocks;        // of 16 rows of b of a CTA, at most kFewBitsWarpBlocks for each warp that has rows of its own
  int32_t row_warps;     // such warps: 1, 2 or 4
  int32_t stages;        // of 128 bytes of k; a multiple of the loaders and of the 8 / row_warps read at a time
  int32_t scale_blocks;  // blocks of 128 rows that the rows of a CTA touch, at most
  int32_t pairs;         // pairs of columns of out are aligned
};

}  // namespace fi
