// How a product of few bf16 tokens and e4m3 weights is shared out to CTAs on Hopper, by launchers.
#pragma once
#include "fi/gemm/gemm_fp8_weights.h"
#include "fi/gemm/gemm_plan.h"
#include "fi/gemm/gemm_small_m_cost.h"

namespace fi {
#if FI_CUDA

// tokens: of a tile.
struct Fp8WeightsShape {
  int64_t m, n, k, tokens;
};

// blocks: of 16 rows of b of a tile; splits: CTAs of a cluster that share its k. The others follow from these.
struct Fp8WeightsTile {
  int64_t blocks = 0, splits = 1, row_warps = 1, stages = 0, own_quads = 0, ring_bytes = 0, shared_bytes = 0;
};

// With the fewest warps that share rows of two blocks each. No stages: it does not fit.
inline Fp8WeightsTile fp8_weights_tile_of(const Fp8WeightsShape& s, int64_t blocks, int64_t splits, int64_t shared) {
  constexpr int64_t kFixed = 1024 + kFp8WeightsBarrierBytes, kLeast = 4;  // of alignment and barriers; of stages
  const int64_t warps = fp8_weights_warps(static_cast<int>(s.tokens)), rows = 16 * blocks;
  Fp8WeightsTile t{blocks, splits};
  while (t.row_warps * kFp8WeightsWarpBlocks < blocks) t.row_warps *= 2;
  const int64_t sets = warps / t.row_warps, at_a_time = sets / 2;
  if (at_a_time == 0) return t;
  t.own_quads = gemm_ceil(s.tokens * rows / 4, splits);
  const int64_t partials = splits == 1 ? 0 : t.own_quads * splits * 16, room = shared - kFixed - partials;
  const int64_t stage = kFp8WeightsStageK * (rows + 2 * s.tokens);
  const int64_t stages = std::min<int64_t>(kFp8WeightsStages, room / stage) / at_a_time * at_a_time;
  t.ring_bytes = std::max(stages * stage, sets * s.tokens * (rows + 4) * int64_t{4});
  t.shared_bytes = kFixed + t.ring_bytes + partials;
  if (stages >= std::max(kLeast, 2 * at_a_time) && t.ring_bytes <= room) t.stages = stages;
  return t;
}

// What a product takes, fitted to 2,000 times of 55 shapes on an H200: the choice is 1.027 of the best on average.
constexpr double kFp8WeightsDramShare = 0.739;     // of the rate of the memory
constexpr double kFp8WeightsShareBytes = 54;       // bytes of L2 in a clock, a multiprocessor
constexpr double kFp8WeightsSmBytes = 208;         // bytes that a multiprocessor takes in a clock
constexpr double kFp8WeightsStageClocks = 243;     // of a stage besides: its barriers and copies
constexpr double kFp8WeightsWaveClocks = 1841;     // of a wave that are not in the mainloop
constexpr double kFp8WeightsExchangeClocks = 462;  // to exchange sums, for each further CTA of a cluster

// Clocks of a product whose tokens have twice the bytes of weights.
inline double fp8_weights_cost(const Fp8WeightsShape& s, const Fp8WeightsTile& t, const GemmCard& card) {
  const int64_t clusters = gemm_ceil(s.m, s.tokens) * gemm_ceil(s.n, 16 * t.blocks);
  const int64_t at_a_time = t.splits == 1 ? card.multiprocessors : card.clusters[t.splits];
  const int64_t stages = gemm_ceil(gemm_ceil(s.k, kFp8WeightsStageK), t.splits);
  const auto weights = static_cast<double>(stages * kFp8WeightsStageK * 16 * t.blocks);
  const auto all = static_cast<double>(stages * kFp8WeightsStageK * (16 * t.blocks + 2 * s.tokens));
  const double dram = kFp8WeightsDramShare * gemm_dram_bytes(card);
  const double l2 = kFp8WeightsShareBytes * static_cast<double>(card.multiprocessors);
  const double alone = all / kFp8WeightsSmBytes + kFp8WeightsStageClocks * static_cast<double>(stages);
  const auto wave = [&](int64_t count) {
    const auto ctas = static_cast<double>(count * t.splits);
    return kFp8WeightsWaveClocks + std::max({ctas * weights / dram, ctas * all / l2, alone});
  };
  return static_cast<double>(clusters / at_a_time) * wave(at_a_time) +
         (clusters % at_a_time ? wave(clusters % at_a_time) : 0.0) +
         kFp8WeightsExchangeClocks * static_cast<double>(t.splits - 1);
}

inline Fp8WeightsTile fp8_weights_tile(const Fp8WeightsShape& s, int64_t shared, const GemmCard& card) {
  Fp8WeightsTile best;
  double least = 0;
  for (int64_t splits = 1; splits <= kGemmSplits; ++splits)
    for (int64_t blocks = 1; blocks <= 16; ++blocks) {
      if ((splits - 1) * gemm_ceil(gemm_ceil(s.k, kFp8WeightsStageK), splits) >= gemm_ceil(s.k, kFp8WeightsStageK))
        continue;
      const Fp8WeightsTile t = fp8_weights_tile_of(s, blocks, splits, shared);
      if (!t.stages) continue;
      const double cost = fp8_weights_cost(s, t, card);
      if (!best.stages || cost < least) best = t, least = cost;
    }
  FI_CHECK(best.stages, RuntimeError, "no tile of weights fits %lld bytes of shared memory",
           static_cast<long long>(shared));
  return best;
}

#endif
}  // namespace fi
