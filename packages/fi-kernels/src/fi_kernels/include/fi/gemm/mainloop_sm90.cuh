// The mainloop of the Hopper GEMM that leaves all sums to wgmma: of 16-bit operands, and of fp8 with fast accumulation.
#pragma once
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/gemm/tile_sm90.cuh"

namespace fi {

// The operands of a consumer warpgroup. kMnMajorB: b is MN-major, and a stage of it [columns / 64][64 k][64 columns].
template <class Tile, class A, class B, bool kMnMajorB = false>
struct StageOperands {
  const uint64_t a, b;  // in stage 0

  FI_DEVICE StageOperands(typename Tile::Operands& operands, int warpgroup)
      : a(wgmma_uniform(wgmma_operand(operands.a[0] + Tile::row(warpgroup) * kSwizzleLineBytes, kSwizzlePeriod))),
        b(wgmma_uniform(wgmma_operand(operands.b[0] + Tile::column(warpgroup) * kSwizzleLineBytes, kSwizzlePeriod,
                                      kMnMajorB ? 64 * kSwizzleLineBytes : 16))) {}

  FI_DEVICE uint64_t a_of(int stage) const { return wgmma_further(a, stage * Tile::kRows * kSwizzleLineBytes); }
  FI_DEVICE uint64_t b_of(int stage) const { return wgmma_further(b, stage * Tile::kColumns * kSwizzleLineBytes); }
  // One m64 block times one stage; accumulators are added to, but for the first instruction if `add` is false. More
  // than 256 columns are two halves.
  template <int kCount>
  FI_DEVICE static void multiply(float (&d)[kCount], uint64_t a, uint64_t b, bool add) {
    if constexpr (kCount > 128) {
      auto& halves = reinterpret_cast<float (&)[2][kCount / 2]>(d);
      multiply(halves[0], a, b, add);
      multiply(halves[1], a, wgmma_further(b, kCount * kSwizzleLineBytes), add);
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma<kMnMajorB>(d, wgmma_further(a, step * 32),
                         wgmma_further(b, step * (kMnMajorB ? 16 * kSwizzleLineBytes : 32)), add || step > 0, A(), B());
    }
  }
};

// A mainloop is that of a consumer warpgroup, whose accumulators are float[kMBlocks][kCount]. all: GemmSm90::Shared;
// k_blocks: of 128 bytes, that this CTA multiplies of a tile.
template <class Tile, class OperandA, class B, bool kMnMajor>
struct Accumulate {
  using A = OperandA;
  static constexpr bool kMnMajorB = kMnMajor, kBlockScales = false, kWholePasses = false;
  static constexpr int kMBlocks = Tile::kOwnRows / 64, kCount = Tile::kOwnColumns / 2;
  static_assert(!kMnMajorB || (sizeof(A) == 2 && Tile::kOwnColumns % 64 == 0), "whole blocks of 64 columns");
  struct Shared {
    FI_DEVICE void init() {}
  };

  typename Tile::Ring& ring;
  const StageOperands<Tile, A, B, kMnMajorB> operands;

  template <class All>
  FI_DEVICE Accumulate(const GemmSm90Params&, All& all, int warpgroup)
      : ring(all.ring), operands(all.operands, warpgroup) {}

  template <class Epilogue>
  FI_DEVICE void multiply(float (&d)[kMBlocks][kCount], const Epilogue&, PipelineState& at, int k_blocks) {
    int before = 0;
    for (int k = 0; k < k_blocks; ++k) {
      const uint64_t a_stage = operands.a_of(at.stage), b_stage = operands.b_of(at.stage);
      ring.pipeline.wait(at);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kMBlocks; ++i)
        operands.multiply(d[i], wgmma_further(a_stage, i * 64 * kSwizzleLineBytes), b_stage, k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (k > 0) ring.release(before);
      before = at.stage;
      at.advance(Tile::kStages);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) wgmma_keep(d[i]);
    ring.release(before);
  }
};

// The same with sums of parts of k that are added in fp32: those of the kernel for few tokens, whose CTAs have a part
// each of stages of two blocks. Products of any number of tokens then have the same bits.
template <class Tile, class OperandA, class B>
struct AccumulateParts : Accumulate<Tile, OperandA, B, false> {
  using Whole = Accumulate<Tile, OperandA, B, false>;
  using Whole::kCount, Whole::kMBlocks;

  const int parts;

  template <class All>
  FI_DEVICE AccumulateParts(const GemmSm90Params& p, All& all, int warpgroup)
      : Whole(p, all, warpgroup), parts(p.splits) {}

  template <class Epilogue>
  FI_DEVICE void multiply(float (&d)[kMBlocks][kCount], const Epilogue& epilogue, PipelineState& at, int k_blocks) {
    const unsigned stages = static_cast<unsigned>(k_blocks + 1) / 2;
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kCount; ++j) d[i][j] = 0.f;
#pragma unroll 1
    for (int part = 0, k = 0; part < parts; ++part) {
      const int end = min(static_cast<int>(stages * (part + 1) / parts) * 2, k_blocks);
      float of_part[kMBlocks][kCount];
      Whole::multiply(of_part, epilogue, at, end - k);
      k = end;
#pragma unroll
      for (int i = 0; i < kMBlocks; ++i)
#pragma unroll
        for (int j = 0; j < kCount; ++j) d[i][j] += of_part[i][j];
    }
  }
};

}  // namespace fi
