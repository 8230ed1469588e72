// The cost of computing a product with a tile shape: a model of the Hopper GEMM, by which the launcher picks one.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fi {

// What decides the time of a product. rows: of one matrix of a, or the expected ones of a group. Element sizes in
// bytes. varied: groups have different numbers of rows.
struct GemmShape {
  int64_t rows, n, k, batch, bytes, out_bytes;
  bool varied = false;
};

// k_block_clocks: of a tile and 128 bytes of k, measured.
struct GemmTiling {
  int64_t rows, columns, k_block_clocks;
};

// Per SM and clock: bytes of L2, of DRAM, and of out that the epilogue moves; clocks of a tile and of a launch that are
// not in the mainloop. NVIDIA H200.
constexpr double kGemmL2Bytes = 62, kGemmDramBytes = 19, kGemmOutBytes = 64, kGemmTileClocks = 1500,
                 kGemmLaunchClocks = 3000;

// What the last, partial tile of a group costs, in tiles, where groups vary and have a tile or more, and up to how many
// rows this is counted. H200, us of the second product of experts with 256 rows of a tile as if groups were equal and
// of the one chosen so: fp8 DeepSeek-V3 3052 and 2682, one of its 8 ranks 318 and 288; bf16 Mixtral 535 and 496.
constexpr double kGemmLastTile = 0.35;
constexpr int64_t kGemmVariedRows = 1024;

inline int64_t gemm_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Clocks on `multiprocessors` SMs.
inline double gemm_cost(const GemmShape& s, const GemmTiling& t, int64_t multiprocessors) {
  const double rows = static_cast<double>(s.rows) / static_cast<double>(t.rows);
  const bool partial = s.varied && s.rows >= t.rows && s.rows <= kGemmVariedRows;
  const double row_tiles = partial ? rows + kGemmLastTile : std::ceil(rows);
  const double tiles = row_tiles * static_cast<double>(s.batch * gemm_ceil(s.n, t.columns));
  const double waves = std::ceil(tiles / static_cast<double>(multiprocessors));
  const double k_blocks = static_cast<double>(gemm_ceil(s.k * s.bytes, 128));
  const double loads = static_cast<double>(t.rows + t.columns) * 128 / kGemmL2Bytes;
  const double epilogue = static_cast<double>(t.rows * t.columns * s.out_bytes) / kGemmOutBytes + kGemmTileClocks;
  const double mainloop = k_blocks * std::max(static_cast<double>(t.k_block_clocks), loads);
  const double compute = waves * (mainloop + epilogue);
  const double bytes = static_cast<double>(s.batch * ((s.rows + s.n) * s.k * s.bytes + s.rows * s.n * s.out_bytes));
  // Where DRAM decides, less computation still hides better.
  const double memory = bytes / (kGemmDramBytes * static_cast<double>(multiprocessors));
  return std::max(compute, memory) + std::min(compute, memory) / 8 + kGemmLaunchClocks;
}

// Tiles along m that the raster walks together: the operands of the tiles that run at the same time are smallest
// where these tiles cover a square.
inline int64_t gemm_group_m(const GemmTiling& t, int64_t multiprocessors) {
  const double area = static_cast<double>(multiprocessors * t.rows * t.columns);
  return std::max<int64_t>(1, std::llround(std::sqrt(area) / static_cast<double>(t.rows)));
}

}  // namespace fi
