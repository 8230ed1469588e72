// Parameters of the GEMM of few bf16 tokens and e4m3 weights on Hopper, shared by launcher and device code.
#pragma once
#include "fi/tensor_map.h"
#include "fi/types.h"

namespace fi {

// k of a stage; blocks of 16 rows of b of a warp, and stages, at most.
constexpr int kFp8WeightsStageK = 128, kFp8WeightsWarpBlocks = 2, kFp8WeightsStages = 24;
// Of shared memory, ahead of the ring.
constexpr int kFp8WeightsBarrierBytes = 1024;
// Warps that multiply; with more tokens sums take twice the registers.
FI_HOST_DEVICE constexpr int fp8_weights_warps(int tokens) { return tokens > 32 ? 8 : 16; }

// out[i, j] = alpha * dot(a[i], b[j]) + bias[j].
struct GemmFp8WeightsParams {
  TensorMap a, b;          // boxes of 128 bytes along k by the tokens and by the rows of b of a tile
  void* out;               // [m, n]
  const float* alpha;      // null: 1
  const void* bias;        // [n], of the type of out; null: none
  int64_t out_row_stride;  // in elements
  int32_t m, n;
  int32_t blocks;     // of 16 rows of b of a tile
  int32_t row_warps;  // that have rows of their own: a power of 2, at most half of the warps
  int32_t stages;     // of the ring; a multiple of those that are read at a time
  int32_t k_stages;   // of k
  int32_t splits;     // CTAs of a cluster that share k, each of which but the last has own_stages of them
  int32_t own_stages;
  int32_t own_quads;    // of sums of four rows of b, of a tile, that each CTA of a cluster adds
  int32_t token_tiles;  // which CTAs beside each other have
  int32_t ring_bytes;   // of the ring, or of the sums of the CTA, which lie there later
  int32_t b_once;       // no row of b is read twice, and L2 can forget them
  int32_t quads;        // groups of four columns of out are aligned
};

}  // namespace fi
