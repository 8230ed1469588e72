// The first product of experts with many rows on Hopper: the GEMM with both projections of 128 features in a tile,
// whose epilogue activates and quantises them.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/fused_moe/e4m3_block.cuh"
#include "fi/fused_moe/expert_activation.h"
#include "fi/fused_moe/moe_gated_gemm.h"
#include "fi/gemm/gemm_sm90.cuh"
#include "fi/gemm/work_tiles.cuh"

namespace fi {

struct StoreActivated {
  static constexpr int kFeatures = 128, kCount = kFeatures / 2;  // of a tile; accumulators of a projection

  const MoeGatedGemmParams& p;

  // d[0]: u, d[1]: g, of 64 rows from `row` on. block: 64 lines of 128 bytes, 16 of each warp.
  FI_DEVICE void store(float (&d)[2][kCount], char* block, const GemmTile& tile, int row) const {
    const int lane = threadIdx.x % 32, first = wgmma_row(threadIdx.x % 128), width = p.gemm.problem.n / 2;
    const int feature = tile.column / 2, left = tile.rows - row;
    const int64_t out_row = tile.row + row;
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = first + 8 * h;
      const float amax = activate_row(d, h), inverse = kE4m3Max / amax;
#pragma unroll
      for (int j = 0; j < kCount; j += 4) {
        const float2 pair = {d[0][j + 2 * h] * inverse, d[0][j + 2 * h + 1] * inverse};
        *reinterpret_cast<uint16_t*>(block + swizzled_offset(own, j / 8) + j / 4 % 2 * 8 + lane % 4 * 2) =
            __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      }
      if (lane % 4 == 0 && own < left)
        p.out_scale[(out_row + own) * (width / kFeatures) + feature / kFeatures] = amax * (1.f / kE4m3Max);
    }
    __syncwarp();
    const int64_t stride = p.gemm.problem.out_row_stride;
    store_rows(block, static_cast<__nv_fp8_e4m3*>(p.gemm.problem.out) + out_row * stride + feature, stride, left,
               kFeatures, true);
  }

 private:
  // d[0] becomes the activated row h of a thread; the largest of its four lanes.
  FI_DEVICE static float activate_row(float (&d)[2][kCount], int h) {
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < kCount; j += 4)
#pragma unroll
      for (int i = j + 2 * h; i < j + 2 * h + 2; ++i) {
        d[0][i] = activate_expert<CudaMath, kExpertSwiglu>(d[0][i], d[1][i], {});
        amax = fmaxf(amax, fabsf(d[0][i]));
      }
    return fmaxf(warp_max(amax, 4), kMinBlockMax);
  }
};

// kBytes: of shared memory that the launch asks for.
template <int kRows, int kColumns, int kStages, int kBytes>
FI_DEVICE void moe_gated_gemm_sm90(const MoeGatedGemmParams& p) {
  using Kernel = GemmSm90<__nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16, false, kRows, kColumns, kRows / 64, kStages,
                          GemmScales::kBlocks, GroupTiles, StoreActivated>;
  Kernel(p.gemm, dynamic_shared<typename Kernel::Shared, 1024, kBytes>(), {p}).run();
}

}  // namespace fi
