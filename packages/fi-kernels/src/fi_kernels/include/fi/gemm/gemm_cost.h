// The cost of computing a product with a tile shape: a model of the Hopper GEMM, by which the launcher picks one.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fi/gemm/gemm.h"

namespace fi {

// What decides the time of a product. rows: of one matrix of a, or the expected ones of a group. Element sizes in
// bytes. varied: groups have different numbers of rows. alone: neither groups nor a batch.
struct GemmShape {
  int64_t rows, n, k, batch, bytes, out_bytes;
  bool varied = false, alone = false;
};

// k_block_clocks: of a tile and 128 bytes of k, measured. splits: CTAs of a cluster that share the k of a tile.
// few_tokens: of the kernel for few tokens, whose clusters share each tile, not only the last one. scaled: warps that
// store multiply by scales of rows and columns.
struct GemmTiling {
  int64_t rows, columns, k_block_clocks, splits = 1;
  bool few_tokens = false, scaled = false;
};

// A card: its SMs, and the clusters of two and more CTAs that run at a time, by their number of CTAs; bytes of L2; by
// its clocks, MHz of the SMs and bytes of memory in a us. Those that stand here are of an NVIDIA H200.
struct GemmCard {
  int64_t multiprocessors, clusters[kGemmSmallMSplits + 1];
  int64_t l2_bytes = 60 << 20;
  double clock_mhz = 1980, memory_bytes = 4916736;
};

// Per SM and clock: bytes of L2, and of out that the epilogue moves; the part of the card's rate of memory; clocks of a
// tile and of a launch that are not in the mainloop; the part of the shorter of computation and memory that the other
// does not hide. That of products alone is fitted to drawn shapes together with the clocks of their tiles.
struct GemmRates {
  double l2_bytes, dram_share, out_bytes, tile_clocks, launch_clocks, not_hidden;
};
constexpr GemmRates kGemmOfGroups{62, 0.896, 64, 1500, 3000, 0.125}, kGemmAlone{69.3, 0.717, 36.7, 1583, 10163, 0.12};

// Of the models, as a part of the clock of a card that rests: the median of 1980 times of tiles with 65 to 256 tokens,
// nine of ten are within 17 % (H200, 1756 MHz).
constexpr double kGemmClockShare = 0.887;
inline double gemm_clocks_of_us(const GemmCard& card) { return kGemmClockShare * card.clock_mhz; }
inline double gemm_dram_bytes(const GemmCard& card) { return card.memory_bytes / gemm_clocks_of_us(card); }

// Clocks of the CTAs of a cluster to meet, for each of them, and bytes of a tile that they exchange in a clock.
constexpr double kGemmMeetClocks = 1170, kGemmRankClocks = 1380, kGemmExchangeBytes = 60;
// The same where they share each tile of 64 x 64, whatever their number. 4000 fits 132 times of 66 to 256 tokens and up
// to 2560 rows of weights best, within 6 %; the choice is best with 5000 to 6000 (99 drawn shapes, H200).
constexpr double kGemmSplitTileClocks = 5000;
// Tiles for few tokens are fitted to products of up to so many; beyond, they must be predicted to take 3 % less. Of 13
// such choices among 240 drawn shapes (H200), 315 x 14336 x 3584 in fp8, predicted 0.998, took 1.03.
constexpr int64_t kGemmFittedTokens = 256;
constexpr double kGemmBeyondFitted = 1.03;
// Of an element that warps scale so: H200, us of 256 x 128, which TMA stores, and of 128 x 192 with scales of rows:
// 8192 x 8192 x 8192 803 and 847 (one scale 833 and 809), 5485 x 28672 x 3584 894 and 968.
constexpr double kGemmScaledClocks = 0.06;
// Up to so many tiles of tokens meet a tile of weights one after the other.
constexpr int64_t kGemmFewTokenTiles = 10;

// What the last, partial tile of a group costs, in tiles, where groups vary and have a tile or more, and up to how many
// rows this is counted. H200, us of the second product of experts with 256 rows of a tile as if groups were equal and
// of the one chosen so: fp8 DeepSeek-V3 3052 and 2682, one of its 8 ranks 318 and 288; bf16 Mixtral 535 and 496.
constexpr double kGemmLastTile = 0.35;
constexpr int64_t kGemmVariedRows = 1024;

inline int64_t gemm_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t gemm_tiles(const GemmShape& s, const GemmTiling& t) {
  return s.batch * gemm_ceil(s.rows, t.rows) * gemm_ceil(s.n, t.columns);
}

// Tiles that each CTA computes alone, before the one that it shares with those of its cluster.
inline int64_t gemm_whole_tiles(int64_t tiles, int64_t splits, const GemmCard& card) {
  return splits == 1 ? INT32_MAX : tiles / (splits * card.clusters[splits]);
}

// Whether each cluster shares one of the tiles that are left at most, and each of its CTAs has blocks of k.
inline bool gemm_shares(const GemmShape& s, const GemmTiling& t, const GemmCard& card) {
  if (t.splits == 1) return true;
  const int64_t tiles = gemm_tiles(s, t), clusters = card.clusters[t.splits];
  const int64_t left = tiles % (t.splits * clusters), k_blocks = gemm_ceil(s.k * s.bytes, 128);
  if (t.splits > 2 && tiles > clusters) return false;  // clusters of more CTAs leave SMs without whole tiles
  return left > 0 && left <= clusters && (t.splits - 1) * gemm_ceil(k_blocks, t.splits) < k_blocks;
}

// Clocks on a card.
inline double gemm_cost(const GemmShape& s, const GemmTiling& t, const GemmCard& card) {
  const GemmRates& rates = s.alone ? kGemmAlone : kGemmOfGroups;
  const double rows = static_cast<double>(s.rows) / static_cast<double>(t.rows);
  const bool partial = s.varied && s.rows >= t.rows && s.rows <= kGemmVariedRows;
  const double row_tiles = partial ? rows + kGemmLastTile : std::ceil(rows);
  const double tiles = row_tiles * static_cast<double>(s.batch * gemm_ceil(s.n, t.columns));
  const double waves = t.splits > 1 ? static_cast<double>(gemm_whole_tiles(gemm_tiles(s, t), t.splits, card))
                                    : std::ceil(tiles / static_cast<double>(card.multiprocessors));
  const int64_t k_blocks = gemm_ceil(s.k * s.bytes, 128);
  const double loads = static_cast<double>(t.rows + t.columns) * 128 / rates.l2_bytes;
  const double elements = static_cast<double>(t.rows * t.columns);
  const double epilogue = elements * static_cast<double>(s.out_bytes) / rates.out_bytes + rates.tile_clocks +
                          (t.scaled ? elements * kGemmScaledClocks : 0.0);
  const double k_block = std::max(static_cast<double>(t.k_block_clocks), loads);
  double compute = waves * (static_cast<double>(k_blocks) * k_block + epilogue);
  if (t.splits > 1 && t.few_tokens)
    compute = static_cast<double>(gemm_ceil(gemm_tiles(s, t), card.clusters[t.splits])) *
              (static_cast<double>(gemm_ceil(k_blocks, t.splits)) * k_block + epilogue + kGemmSplitTileClocks);
  else if (t.splits > 1)
    compute += static_cast<double>(gemm_ceil(k_blocks, t.splits)) * k_block + epilogue + kGemmMeetClocks +
               kGemmRankClocks * static_cast<double>(t.splits) +
               static_cast<double>(t.rows * t.columns * 4) / kGemmExchangeBytes;
  const double bytes = static_cast<double>(s.batch * ((s.rows + s.n) * s.k * s.bytes + s.rows * s.n * s.out_bytes));
  // Where DRAM decides, less computation still hides better.
  const double memory = bytes / (rates.dram_share * gemm_dram_bytes(card));
  const double clocks = std::max(compute, memory) + std::min(compute, memory) * rates.not_hidden + rates.launch_clocks;
  return t.few_tokens && s.rows > kGemmFittedTokens ? clocks * kGemmBeyondFitted : clocks;
}

// Tiles along m that the raster walks together: the operands of the tiles that run at the same time are smallest
// where these tiles cover a square.
inline int64_t gemm_group_m(const GemmTiling& t, int64_t multiprocessors) {
  const double area = static_cast<double>(multiprocessors * t.rows * t.columns);
  return std::max<int64_t>(1, std::llround(std::sqrt(area) / static_cast<double>(t.rows)));
}

}  // namespace fi
