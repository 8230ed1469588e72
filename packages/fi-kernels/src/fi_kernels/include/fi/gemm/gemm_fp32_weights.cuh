// GEMM of few bf16 tokens and fp32 weights, as routers have them: weights go from memory to registers, become three
// bf16 terms, and meet tokens in mma.sync. The order of k in a product is free, so a lane has four neighbouring k of
// each 16.
#pragma once
#include <cuda_bf16.h>

#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/gemm/gemm_fp32_weights.h"

namespace fi {

// kVectors: rows of a and b are aligned to four elements, and so is k. kCluster: CTAs of a cluster share k.
//
// Terms have sums of their own, which meet once a warp; warps are added in their order, CTAs in theirs. So a sum
// depends on n, k and the card only: a token's result is the same in any batch.
template <bool kVectors, bool kCluster>
struct GemmFp32Weights {
  static constexpr int kTokens = kFp32WeightsTokens, kRows = kFp32WeightsRows, kWarps = kFp32WeightsWarps;
  static constexpr int kBlockK = kFp32WeightsBlockK, kHalves = kBlockK / 16, kTerms = kFp32WeightsTerms;
  static constexpr int kAhead = 4;  // blocks that a warp loads before it multiplies: 64 KB of weights of a CTA

  struct Shared {
    float of_warp[kWarps][kTokens * kRows], of_cta[kTokens * kRows];
  };
  struct Operands {
    float4 weights[kHalves];
    uint2 tokens[kHalves][2];  // of the rows l / 4 and l / 4 + 8
  };

  const GemmFp32WeightsParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int ctas = kCluster ? static_cast<int>(cluster_size()) : 1;
    const int rank = kCluster ? static_cast<int>(cluster_rank()) : 0;
    const int row = static_cast<int>(blockIdx.x) / ctas * kRows, token = blockIdx.y * kTokens;
    pdl_wait();
    float sum[kTerms][4] = {};
    multiply(sum, row + lane / 4, token + lane / 4, lane % 4 * 4, rank * kWarps + warp, ctas * kWarps);
    pdl_launch_dependents();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float terms[kTerms] = {sum[0][e], sum[1][e], sum[2][e]};
      shared.of_warp[warp][(lane / 4 + e / 2 * 8) * kRows + lane % 4 * 2 + e % 2] = sum_of_terms(terms);
    }
    __syncthreads();
    const int at = threadIdx.x;
    float total = 0.f;
    if (at < kTokens * kRows)
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += shared.of_warp[i][at];
    if constexpr (kCluster) {
      if (ctas > 1) total = sum_of_ctas(total, ctas);
    }
    const int own_token = token + at / kRows, own_row = row + at % kRows;
    if (rank == 0 && at < kTokens * kRows && own_token < p.m && own_row < p.n)
      p.out[own_token * p.out_row_stride + own_row] = total;
  }

 private:
  // By all threads of the cluster. Those of its first CTA have the sum.
  FI_DEVICE float sum_of_ctas(float total, int ctas) const {
    const int at = threadIdx.x;
    if (at < kTokens * kRows) shared.of_cta[at] = total;
    cluster_sync();
    if (at < kTokens * kRows && cluster_rank() == 0)
      for (int i = 1; i < ctas; ++i) total += __uint_as_float(cluster_load_u32(cluster_address(&shared.of_cta[at], i)));
    cluster_sync();  // the memory of a CTA is read until here
    return total;
  }

  // Blocks of k `first`, first + step, ..; k: the first of this lane in a half of a block.
  FI_DEVICE void multiply(float (&sum)[kTerms][4], int row, int token, int k, int first, int step) const {
    const float* weights = p.b + min(row, p.n - 1) * p.b_row_stride;
    const uint16_t* tokens[2] = {p.a + min(token, p.m - 1) * p.a_row_stride,
                                 p.a + min(token + 8, p.m - 1) * p.a_row_stride};
    for (int at = first * kBlockK + k; at - k < p.k; at += kAhead * step * kBlockK) {
      Operands x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const int own = at + i * step * kBlockK + h * 16;
          load(x[i].weights[h], weights, own);
          load(x[i].tokens[h][0], tokens[0], own);
          load(x[i].tokens[h][1], tokens[1], own);
        }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) multiply(sum, x[i].weights[h], x[i].tokens[h]);
    }
  }

  // Four elements of a row from k on; 0 beyond its end.
  FI_DEVICE void load(float4& to, const float* row, int k) const {
    if constexpr (kVectors) {
      to = k < p.k ? __ldg(reinterpret_cast<const float4*>(row + k)) : float4{};
    } else {
      to = {k < p.k ? row[k] : 0.f, k + 1 < p.k ? row[k + 1] : 0.f, k + 2 < p.k ? row[k + 2] : 0.f,
            k + 3 < p.k ? row[k + 3] : 0.f};
    }
  }
  FI_DEVICE void load(uint2& to, const uint16_t* row, int k) const {
    if constexpr (kVectors) {
      to = k < p.k ? __ldg(reinterpret_cast<const uint2*>(row + k)) : uint2{};
    } else {
      const unsigned x[4] = {k < p.k ? row[k] : 0u, k + 1 < p.k ? row[k + 1] : 0u, k + 2 < p.k ? row[k + 2] : 0u,
                             k + 3 < p.k ? row[k + 3] : 0u};
      to = {x[0] | x[1] << 16, x[2] | x[3] << 16};
    }
  }

  FI_DEVICE static Bf16Terms terms(float weight) {
    return Bf16Terms::split(
        weight, [](unsigned x) { return __uint_as_float(x); }, [](float x) { return __float_as_uint(x); });
  }
  // The upper halves of two terms.
  FI_DEVICE static unsigned pair(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
  }
  FI_DEVICE static void multiply(float (&sum)[kTerms][4], const float4& weights, const uint2 (&tokens)[2]) {
    const Bf16Terms w[4] = {terms(weights.x), terms(weights.y), terms(weights.z), terms(weights.w)};
    const unsigned of_tokens[4] = {tokens[0].x, tokens[1].x, tokens[0].y, tokens[1].y};
#pragma unroll
    for (int t = 0; t < kTerms; ++t)
      mma_m16n8k16(sum[t], of_tokens, pair(w[0].of[t], w[1].of[t]), pair(w[2].of[t], w[3].of[t]), __nv_bfloat16());
  }
};

template <bool kVectors, bool kCluster>
FI_DEVICE void gemm_fp32_weights(const GemmFp32WeightsParams& p) {
  using Kernel = GemmFp32Weights<kVectors, kCluster>;
  __shared__ typename Kernel::Shared shared;
  Kernel{p, shared}.run();
}

}  // namespace fi
