// The first product of experts with many rows on Hopper: the GEMM with both projections of the same features in a tile,
// whose epilogue activates, and quantises e4m3.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/fused_moe/e4m3_block.cuh"
#include "fi/fused_moe/moe_gated_gemm.h"
#include "fi/gemm/gemm_sm90.cuh"

namespace fi {

FI_DEVICE const GemmSm90Params& gemm_of(const MoeGatedGemmParams& params) { return params.gemm; }

// Of gated tiles: kFeatures features of a warpgroup, which has 64 rows.
template <class Tile, class T, ExpertActivation kAct>
struct StoreGated : StoreRows<Tile, T, GemmScaled::kNever> {
  using Params = MoeGatedGemmParams;
  using Rows = StoreRows<Tile, T, GemmScaled::kNever>;
  using Rows::out, Rows::warpgroup;
  static constexpr int kFeatures = Tile::kHalf, kSums = kFeatures / 2;  // kSums: accumulators of a projection
  static constexpr bool kFp8 = sizeof(T) == 1;

  const MoeGatedGemmParams& p;

  template <class All>
  FI_DEVICE StoreGated(const MoeGatedGemmParams& params, All& all, int of_warpgroup)
      : Rows(params.gemm, all, of_warpgroup), p(params) {}

  // d: u, then g.
  template <int kMBlocks, int kCount>
  FI_DEVICE void store(float (&d)[kMBlocks][kCount], const typename Rows::Scales&, const GemmTile& tile, int) const {
    static_assert(kMBlocks * kCount == 2 * kSums, "both projections");
    const int row = Tile::row(warpgroup), feature = tile.column / 2 + Tile::column(warpgroup) / 2;
    float* u = &d[0][0];
    const int left = tile.rows - row, columns = p.gemm.problem.n / 2 - feature;
    const int64_t out_row = tile.row + row, stride = p.gemm.problem.out_row_stride;
    T* to = static_cast<T*>(p.gemm.problem.out) + out_row * stride + feature;
    __syncwarp();
    if constexpr (kFp8) {
      activate<0, kSums>(u, tile.b_batch, feature, out_row, left);
      stage_e4m3(u, out, out_row, left, feature);
      __syncwarp();
      store_rows(out, to, stride, left, kFeatures, true);
    } else {
      store_block<0>(d[0], out, tile.b_batch, feature, out_row, to, left, columns);
      if constexpr (kFeatures > 64) store_block<64>(d[0], out, tile.b_batch, feature, out_row, to, left, columns);
    }
  }

 private:
  // Up to 64 features from kFirst on. Only theirs are activated, so that few registers are in use beside accumulators.
  template <int kFirst>
  FI_DEVICE void store_block(float (&d)[2 * kSums], char* block, int expert, int feature, int64_t row, T* out, int left,
                             int columns) const {
    constexpr int kOwn = kFeatures - kFirst < 64 ? kFeatures - kFirst : 64;
    activate<kFirst / 2, kOwn / 2>(d, expert, feature, row, left);
    stage_block<T>(block, d, kFirst / 2, NoScales());
    __syncwarp();
    store_rows(block, out + kFirst, p.gemm.problem.out_row_stride, left, min(kOwn, columns - kFirst), true);
    __syncwarp();
  }

  // u: sums of both projections, of which kCount from kFirst on become the activated values. Those of features beyond
  // the last are not stored.
  template <int kFirst, int kCount>
  FI_DEVICE void activate(float* u, int expert, int feature, int64_t row, int left) const {
    if (p.bias) {
      if (p.bias_is_float)
        add_bias<float, kFirst, kCount>(u, expert, feature);
      else if constexpr (!kFp8)
        add_bias<T, kFirst, kCount>(u, expert, feature);
    }
    if (p.delta) {
      if (p.delta_is_half)
        add_delta<__half, kFirst, kCount>(u, row, left, feature);
      else
        add_delta<__nv_bfloat16, kFirst, kCount>(u, row, left, feature);
    }
    ExpertConstants constants = p.constants;
    if (p.alpha) constants.alpha = p.alpha[expert];
    if (p.beta) constants.beta = p.beta[expert];
    if (p.limit) constants.limit = p.limit[expert];
#pragma unroll
    for (int i = kFirst; i < kFirst + kCount; ++i)
      u[i] = activate_expert<CudaMath, kAct>(u[i], u[kSums + i], constants);
  }

  template <class Bias, int kFirst, int kCount>
  FI_DEVICE void add_bias(float* u, int expert, int feature) const {
    const int width = p.gemm.problem.n / 2, first = feature + threadIdx.x % 4 * 2;
    const Bias* of_u = static_cast<const Bias*>(p.bias) + expert * p.bias_row_stride;
#pragma unroll
    for (int i = kFirst; i < kFirst + kCount; i += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Bias* from = of_u + min(first + i * 2 + c, width - 1);
        const float bias_u = to_float(from[0]), bias_g = to_float(from[width]);
        u[i + c] += bias_u, u[i + c + 2] += bias_u;
        u[kSums + i + c] += bias_g, u[kSums + i + c + 2] += bias_g;
      }
    }
  }

  // Few loads in flight, as accumulators take most registers. Features beyond the last get those of the last.
  template <class Delta, int kFirst, int kCount>
  FI_DEVICE void add_delta(float* u, int64_t row, int left, int feature) const {
    const int width = p.gemm.problem.n / 2, first = feature + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = wgmma_row(threadIdx.x % 128) + 8 * h;
      if (own >= left) continue;
      const Delta* from = static_cast<const Delta*>(p.delta) + (row + own) * p.delta_row_stride;
#pragma unroll
      for (int half = 0; half < 2; ++half, from += width) {
        float* sums = u + (half ? 0 : kSums) + 2 * h;
#pragma unroll
        for (int i = kFirst; i < kFirst + kCount; i += 4) {
#pragma unroll
          for (int c = 0; c < 2; ++c)
            sums[i + c] += to_float(from[kFp8 ? first + i * 2 + c : min(first + i * 2 + c, width - 1)]);
          if (i % 16 == 12) asm volatile("" ::: "memory");
        }
      }
    }
  }

  // The four lanes of a row have all 128 features that share a scale.
  FI_DEVICE void stage_e4m3(float* u, char* block, int64_t out_row, int left, int feature) const {
    const int lane = threadIdx.x % 32, first = wgmma_row(threadIdx.x % 128), width = p.gemm.problem.n / 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = first + 8 * h;
      float amax = 0.f;
#pragma unroll
      for (int i = 0; i < kSums; i += 4) amax = fmaxf(amax, fmaxf(fabsf(u[i + 2 * h]), fabsf(u[i + 2 * h + 1])));
      amax = fmaxf(warp_max(amax, 4), kMinBlockMax);
      const float inverse = kE4m3Max / amax;
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const float2 pair = {u[i + 2 * h] * inverse, u[i + 2 * h + 1] * inverse};
        *reinterpret_cast<uint16_t*>(block + swizzled_offset(own, i / 8) + i / 4 % 2 * 8 + lane % 4 * 2) =
            __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      }
      if (lane % 4 == 0 && own < left)
        p.out_scale[(out_row + own) * (width / kFeatures) + feature / kFeatures] = amax * (1.f / kE4m3Max);
    }
  }
};

}  // namespace fi
