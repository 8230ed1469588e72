// The mainloop of GEMM kernels for few tokens: warpgroups multiply 64 rows of weights each by the tokens of a stage.
#pragma once
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"

namespace fi {

// A stage has kBlocks blocks of 128 bytes along k, of kTokens rows of a (tokens) and kWarpgroups * 64 rows of b
// (weights). kScaleRows: rows of b that share the scale of 128 k, 1 or 128; 0: no block scales. kGated: 8 rows of b and
// the next 8 have different scales of blocks.
//
// The tensor cores add fp8 products with about 14 bits, so each stage (each block, if blocks have scales) has
// accumulators of its own, which are added to the sum in fp32 while the tensor cores compute the next stage.
template <class A, class B, int kTokens, int kWarpgroups, int kBlocks, int kStages, int kScaleRows, bool kGated = false>
struct SmallMMainloop {
  static constexpr bool kFp8 = sizeof(A) == 1, kBlockScales = kScaleRows > 0;
  static constexpr int kRows = 64 * kWarpgroups, kLine = kSwizzleLineBytes, kCount = kTokens / 2;
  static constexpr int kParts = kBlockScales ? kBlocks : 1;
  static constexpr bool kTwoSets = kParts * kCount <= (kWarpgroups <= 2 ? 32 : 16);  // of accumulators
  // Scales of b in a block.
  static constexpr int kScales = kScaleRows == 1 ? kRows : kScaleRows == 128 ? kWarpgroups * (kGated ? 2 : 1) : 1;
  static constexpr int kReleases = kWarpgroups * (kBlockScales ? 4 : 1);  // arrivals of consumers on a stage
  static_assert(kStages >= 2, "a stage is released when the next one has arrived");

  // Operands, and with block scales also these, which threads load.
  using Ring = Pipeline<kStages, Writer::kThreads, kBlockScales ? Reader::kBoth : Reader::kProducts>;
  struct Operands {
    alignas(1024) char b[kStages][kBlocks][kRows * kLine];
    alignas(1024) char a[kStages][kBlocks][kTokens * kLine];
  };
  struct Scales {
    alignas(16) float a[kBlockScales ? kStages : 1][kBlocks][kTokens];
    alignas(16) float b[kBlockScales ? kStages : 1][kBlocks][kScales];
  };

  Operands& operands;
  Scales& scales;
  Ring& pipeline;
  int steps;  // stages of a tile
  uint64_t a, b;

  // By consumers.
  FI_DEVICE SmallMMainloop(Operands& o, Scales& s, Ring& p, int stages)
      : operands(o),
        scales(s),
        pipeline(p),
        steps(stages),
        a(wgmma_uniform(wgmma_operand(o.a[0][0], kSwizzlePeriod))),
        b(wgmma_uniform(wgmma_operand(o.b[0][0] + warpgroup_index() * 64 * kLine, kSwizzlePeriod))) {}

  // sum: of the stages from `at` on.
  FI_DEVICE void run(float (&sum)[kCount], PipelineState& at) {
    if constexpr (kFp8)
      multiply_in_parts(sum, at);
    else
      multiply(sum, at);
  }

 private:
  // Issues the products of a stage; blocks of different parts are separate wgmma groups.
  FI_DEVICE static void issue(float (&d)[kParts][kCount], uint64_t b, uint64_t a, bool add) {
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int part = kParts > 1 ? block : 0;
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma(d[part], wgmma_further(b, block * kRows * kLine + step * 32),
              wgmma_further(a, block * kTokens * kLine + step * 32), add || step > 0 || (kParts == 1 && block > 0), B(),
              A());
      if (kParts > 1 || block == kBlocks - 1) wgmma_commit();
    }
  }
  FI_DEVICE void issue_stage(float (&d)[kParts][kCount], const PipelineState& at, bool add) {
    pipeline.wait(at);
    issue(d, wgmma_further(b, at.stage * sizeof(operands.b[0])), wgmma_further(a, at.stage * sizeof(operands.a[0])),
          add);
  }

  FI_DEVICE void release(int stage) {
    if constexpr (kBlockScales)
      pipeline.release_warp(stage);
    else
      pipeline.release_warpgroup(stage);
  }

  FI_DEVICE void multiply(float (&sum)[kCount], PipelineState& at) {
    float d[1][kCount];
    int before = 0;
    for (int i = 0; i < steps; ++i, at.advance(kStages)) {
      issue_stage(d, at, i > 0);
      wgmma_wait<1>();
      if (i > 0) release(before);
      before = at.stage;
    }
    wgmma_finish(d[0]);
    release(before);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] = d[0][j];
  }

  // Adds a finished stage to the sum and releases it. kPending: groups that were issued after it.
  template <int kPending>
  FI_DEVICE void add_stage(float (&sum)[kCount], float (&d)[kParts][kCount], int stage) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part == 0)
        wgmma_wait<kPending + kParts - 1>();
      else
        wgmma_wait<kPending>();
      wgmma_keep(d[part]);
      if constexpr (kBlockScales) {
        const int row = threadIdx.x / 128 * 64 + wgmma_row(threadIdx.x % 128);
        const float* of_rows = scales.b[stage][part];
        const int warpgroup = threadIdx.x / 128;
        const float low = of_rows[kScaleRows == 1 ? row : kGated ? warpgroup * 2 : warpgroup];
        const float high = kScaleRows == 1 ? of_rows[row + 8] : kGated ? of_rows[warpgroup * 2 + 1] : low;
#pragma unroll
        for (int j = 0; j < kCount; j += 4) {
          const float2 token = *reinterpret_cast<const float2*>(&scales.a[stage][part][j * 2 + threadIdx.x % 4 * 2]);
          sum[j] += d[part][j] * (low * token.x);
          sum[j + 1] += d[part][j + 1] * (low * token.y);
          sum[j + 2] += d[part][j + 2] * (high * token.x);
          sum[j + 3] += d[part][j + 3] * (high * token.y);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] += d[part][j];
      }
    }
    release(stage);
  }

  FI_DEVICE void multiply_in_parts(float (&sum)[kCount], PipelineState& at) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] = 0.f;
    if constexpr (kTwoSets) {
      float even[kParts][kCount], odd[kParts][kCount];
      issue_stage(even, at, false);
      int stage = at.stage, i = 1;
      at.advance(kStages);
      for (; i + 1 < steps; i += 2) {
        issue_stage(odd, at, false);
        add_stage<kParts>(sum, even, stage);
        stage = at.stage;
        at.advance(kStages);
        issue_stage(even, at, false);
        add_stage<kParts>(sum, odd, stage);
        stage = at.stage;
        at.advance(kStages);
      }
      if (i < steps) {
        issue_stage(odd, at, false);
        add_stage<kParts>(sum, even, stage);
        add_stage<0>(sum, odd, at.stage);
        at.advance(kStages);
      } else {
        add_stage<0>(sum, even, stage);
      }
    } else {
      float d[kParts][kCount];
      for (int i = 0; i < steps; ++i, at.advance(kStages)) {
        issue_stage(d, at, false);
        add_stage<0>(sum, d, at.stage);
      }
    }
  }
};

}  // namespace fi
