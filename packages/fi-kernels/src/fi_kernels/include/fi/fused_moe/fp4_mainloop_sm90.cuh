// The mainloop of the expert GEMM on mxfp4 weights: warpgroups widen 64 rows of weights each in registers, which are
// the first operand of wgmma.
#pragma once
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/fused_moe/widen_weight.cuh"

namespace fi {

// A stage has kBlocks blocks of 256 k: 128 bytes of each of kWarpgroups * 64 rows of weights, and kTokens rows of
// tokens in four lines of 128 bytes (TokenForm::kOfPairs). T: of tokens and widened weights. A lane holds 32
// neighbouring weights of a row at a time, which share a scale.
//
// Rows of 8 lie in another order, so that the lanes of a load meet all banks: logical row g is stored row row_of(g).
template <class T, int kTokens, int kWarpgroups, int kBlocks, int kStages>
struct Fp4Mainloop {
  static constexpr int kRows = 64 * kWarpgroups, kLine = kSwizzleLineBytes, kCount = kTokens / 2;
  static constexpr int kReleases = 4 * kWarpgroups, kScales = kRows;
  static constexpr int kSteps = 8;  // of 16 k, of half a block

  struct Operands {
    alignas(1024) char b[kStages][kBlocks][kRows * kLine];
    alignas(1024) char a[kStages][kBlocks][4 * kTokens * kLine];
  };
  struct Scales {
    alignas(16) uint2 b[kStages][kBlocks][kRows];  // e8m0, of the 8 groups of a row
  };

  Operands& operands;
  Scales& scales;
  Pipeline<kStages>& pipeline;
  int steps;  // stages of a tile
  uint64_t a;
  int row;  // stored row of this lane's first logical row

  FI_DEVICE static int row_of(int logical) { return logical / 2 + logical % 2 * 4; }

  FI_DEVICE Fp4Mainloop(Operands& o, Scales& s, Pipeline<kStages>& p, int stages)
      : operands(o),
        scales(s),
        pipeline(p),
        steps(stages),
        a(wgmma_uniform(wgmma_operand(o.a[0][0], kSwizzlePeriod))),
        row(static_cast<int>(threadIdx.x) / 32 * 16 + row_of(static_cast<int>(threadIdx.x) % 32 / 4)) {}

  FI_DEVICE void run(float (&sum)[kCount], PipelineState& at) {
    unsigned x[2][kSteps][4] = {};
    float d[kCount];
    int before = 0;
    for (int i = 0; i < steps; ++i, at.advance(kStages)) {
      pipeline.wait(at);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint2 low = scales.b[at.stage][block][row], high = scales.b[at.stage][block][row + 8];
        const uint64_t tokens = wgmma_further(a, (at.stage * kBlocks + block) * sizeof(operands.a[0][0]));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          wgmma_wait<1>();
          keep(x[half]);
          if (block == 0 && half == 1 && i > 0) release(before);
          widen_half(x[half], operands.b[at.stage][block], half, half ? low.y : low.x, half ? high.y : high.x);
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < kSteps; ++s)
            wgmma<false>(d, x[half][s], wgmma_further(tokens, (half * 2 + s / 4) * kTokens * kLine + s % 4 * 32),
                         i > 0 || block > 0 || half > 0 || s > 0, T(), T());
          wgmma_commit();
        }
      }
      before = at.stage;
    }
    wgmma_wait<0>();
    wgmma_keep(d);
    keep(x[0]);
    keep(x[1]);
    release(before);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] = d[j] * kSumFactor<kMxfp4, T>;
  }

 private:
  // Registers that products read until they are waited for.
  FI_DEVICE static void keep(unsigned (&x)[kSteps][4]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[s][i]));
  }
  FI_DEVICE void release(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.empty[stage].arrive();
  }
  // Fragments of 128 k. codes: the scales of four groups of this lane's two rows.
  FI_DEVICE void widen_half(unsigned (&x)[kSteps][4], const char* rows, int half, unsigned low, unsigned high) const {
    const int group = threadIdx.x % 4;
    const char* from = rows + swizzled_offset(row, half * 4 + group);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 words = *reinterpret_cast<const uint4*>(from + r * 8 * kLine);
      const unsigned scale = scale_pair<kMxfp4, T>((r ? high : low) >> group * 8 & 255);
      const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        unsigned pairs[4];
        const unsigned both[2] = {word[w], 0};
        widen_weights<kMxfp4, T>(both, scale, pairs);
        x[2 * w][r] = pairs[0];
        x[2 * w][r + 2] = pairs[1];
        x[2 * w + 1][r] = pairs[2];
        x[2 * w + 1][r + 2] = pairs[3];
      }
    }
  }
};

}  // namespace fi
