// chunk_gated_delta_rule by wgmma, on Hopper: as the kernels of mma.sync, with products of warpgroups.
#pragma once
#include "fi/cuda/ptx/mbarrier_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/linear_attention/carry_states.cuh"
#include "fi/linear_attention/chunk_states.cuh"
#include "fi/linear_attention/prepare_chunks.cuh"

namespace fi {

// Products of 64 rows in registers of a warpgroup with tiles of 64 tokens.
template <class T, int kD>
struct WgmmaProducts {
  using Tile = ChunkTile<kD>;
  using Matrix = SquareTriangle;
  static constexpr bool kAsync = true;
  static constexpr int kAlignment = 1024, kSteps = kD / 16, kBlocks = kChunkTokens / 16;

  // Makes this thread's copies visible to wgmma.
  FI_DEVICE static void fence() { fence_async_shared(); }
  template <int kPending, int kCount>
  FI_DEVICE static void finish(float (&d)[kCount]) {
    wgmma_wait<kPending>();
    wgmma_keep(d);
  }

  // d = a times the rows of a tile, transposed.
  FI_DEVICE static void rows(float (&d)[32], const unsigned (&a)[kSteps][4], const char* tile) {
    const uint64_t b = wgmma_operand(tile, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma<false>(d, a[step], wgmma_further(b, step / 4 * Tile::kBlockBytes + step % 4 * 32), step > 0, T(), T());
    wgmma_commit();
  }
  // d = a times a lower triangular matrix, transposed, or d += that.
  FI_DEVICE static void lower(float (&d)[32], const unsigned (&a)[kBlocks][4], const char* matrix, bool accumulate) {
    const uint64_t b = wgmma_operand(matrix, 256, 128, kWgmmaNone);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlocks; ++step)
      wgmma<false>(d, a[step], wgmma_further(b, step * Matrix::kColumnBytes), accumulate || step > 0, T(), T());
    wgmma_commit();
  }
  // d += a times a tile.
  FI_DEVICE static void columns(float (&d)[kD / 2], const unsigned (&a)[kBlocks][4], const char* tile) {
    const uint64_t b = wgmma_operand(tile, 1024, Tile::kBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlocks; ++step) wgmma(d, a[step], wgmma_further(b, step * 2048), true, T(), T());
    wgmma_commit();
  }
};

template <class T, int kD, int kColumns, int kBytes>
FI_DEVICE void chunk_gated_delta_rule_wgmma(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<ChunkStates<T, kD, kColumns, WgmmaProducts<T, kD>>, 1024, kBytes>(p);
}
template <class T, int kD, int kColumns, int kBytes>
FI_DEVICE void map_segments_wgmma(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<ChunkStates<T, kD, kColumns, WgmmaProducts<T, kD>, true>, 1024, kBytes>(p);
}

}  // namespace fi
