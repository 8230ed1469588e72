// The cost of computing a product of few tokens with a tile shape and a split of k: a model of the Hopper kernel.
#pragma once
#include "fi/gemm/gemm_cost.h"

namespace fi {

// rows: tokens that meet a matrix of b, or the expected ones of a group. k_blocks: of 128 bytes.
struct GemmSmallMShape {
  int64_t rows, n, k_blocks, batch;
};

// tokens: rows of a of a tile; columns: rows of b, 64 for each warpgroup; splits: CTAs of a cluster that share a tile.
struct GemmSmallMTiling {
  int64_t tokens, columns, stage_blocks, splits;
};

// NVIDIA H200. Weights that are to be evicted first stream 8-15 % faster below this size (dirty lines of other kernels
// stay where they are), 2-3 % slower above it: 28672 x 4096 in bf16 69.7 -> 67.6 us, 57344 x 8192 223 -> 231.
constexpr int64_t kGemmSmallMEvictFirstBytes = 256 << 20;
// The part of the card's rate of memory. Bytes per clock from L2: of one SM, and of each where all load. Clocks of a
// launch.
constexpr double kGemmSmallMDramShare = 0.893, kGemmSmallMSmBytes = 45, kGemmSmallMShareBytes = 30.3,
                 kGemmSmallMLaunchClocks = 3000;

// Of the time to load a tile, what is left behind the last load. H200, 1 x 36864 x 7168, us of tiles of 64 to 256 rows:
// bf16 134, 143, 146, 152; fp8 74.4, 78.4, 78.6, 84.2.
constexpr double kGemmSmallMTail = 0.2;

// Only CTAs of two warpgroups at most have room for partial tiles; each CTA has a stage.
inline bool gemm_small_m_fits(const GemmSmallMShape& s, const GemmSmallMTiling& t) {
  return t.splits == 1 || (t.columns <= 128 && t.splits <= gemm_ceil(s.k_blocks, t.stage_blocks));
}

// Clocks on a card: of whole waves of CTAs and of the last one, which has fewer.
inline double gemm_small_m_cost(const GemmSmallMShape& s, const GemmSmallMTiling& t, const GemmCard& card) {
  const int64_t multiprocessors = card.multiprocessors;
  const int64_t tiles = s.batch * gemm_ceil(std::max<int64_t>(1, s.rows), t.tokens) * gemm_ceil(s.n, t.columns);
  const int64_t in_wave = std::max<int64_t>(1, multiprocessors / t.splits) * t.splits, ctas = tiles * t.splits;
  const int64_t stages = gemm_ceil(gemm_ceil(s.k_blocks, t.stage_blocks), t.splits);
  const double weights = static_cast<double>(t.columns * stages * t.stage_blocks * 128);
  const double all = static_cast<double>((t.columns + t.tokens) * stages * t.stage_blocks * 128);
  const double dram = kGemmSmallMDramShare * gemm_dram_bytes(card);
  const double l2 = kGemmSmallMShareBytes * static_cast<double>(multiprocessors);
  const auto wave = [&](int64_t count) {
    const double n = static_cast<double>(count);
    return std::max({n * weights / dram, n * all / l2, all / kGemmSmallMSmBytes});
  };
  return static_cast<double>(ctas / in_wave) * wave(in_wave) + (ctas % in_wave ? wave(ctas % in_wave) : 0.0) +
         kGemmSmallMTail * all / kGemmSmallMSmBytes + kGemmSmallMLaunchClocks;
}

// CTAs that share a tile: the fewest with which 40 CTAs stream the weights; the launch of clusters and the exchange of
// partial tiles take 1 us and more. Three CTAs replace two. Tiles with few k are not split. H200, us of one, two and
// three CTAs: bf16 16 x 2880 x 4096 (45 tiles) 13.1, 14.1, -; 12 x 2560 x 8192 (40) 18.5, 19.0, 21.5; 32 x 2112 x 7168
// (33) 18.1, 16.4, 16.2; 5 x 2048 x 2048 (32) 9.2, 9.9, 9.8; fp8 2 x 2560 x 8192 12.8, 13.4, 15.8; 16 x 1792 x 5120
// (28) 10.1, -, 10.1. It depends on the weights only, so that a token's result is the same in any batch; products of
// more tokens than a tile has are another matter, as are those of the other kernels.
inline int64_t gemm_small_m_splits(const GemmSmallMShape& s, int64_t m_tiles) {
  constexpr int64_t kStreams = 40, kShortTiles = 24, kShortBlocks = 40;
  int64_t splits = 1;
  const int64_t tiles = s.batch * gemm_ceil(s.n, 64);
  if (m_tiles > 1 && m_tiles * tiles >= kStreams) return splits;
  if (tiles >= kShortTiles && s.k_blocks <= kShortBlocks) return splits;
  while (splits < 8 && tiles * splits < kStreams && gemm_small_m_fits(s, {8, 64, 2, splits * 2})) splits *= 2;
  return splits == 2 && gemm_small_m_fits(s, {8, 64, 2, 3}) ? 3 : splits;
}

// Parts of k that are added one by one for any number of tokens inside of batch_invariant(): those that the products of
// few tokens have outside, but two in place of three, which are faster for 65 to 128 tokens. H200, us of 2048 x 4096
// and 1536 x 7168 with 128 tokens: 13.0 and 18.3 in three parts, 10.4 and 13.3 in two.
inline int64_t gemm_fixed_parts(int64_t n, int64_t k_blocks) {
  const int64_t parts = gemm_small_m_splits({1, n, k_blocks, 1}, 1);
  return parts == 3 ? 2 : parts;
}

}  // namespace fi
