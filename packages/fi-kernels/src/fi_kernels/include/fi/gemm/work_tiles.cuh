// The tile schedulers of GEMM, for kernels whose Params have the problem and the raster: which tile of which product a
// CTA computes next. Every warp of a CTA walks the same tiles by itself, so warps need no
// communication.
#pragma once
#include "fi/cuda/tile_scheduler.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/gemm/gemm_sm90.h"

namespace fi {

// A tile of out for one CTA. Row numbers count in the matrix a_batch of a and out.
struct GemmTile {
  int row, column;       // the first ones
  int rows;              // that exist, from `row` on; may be more than the tile has, or negative
  int a_batch, b_batch;  // matrices of a (and out) and of b
  int shared;            // the CTAs of a cluster share its k; by kernels that may do so
};

// Tiles of a batch of equal products, and of one whose rows have the group of each 128 rows. The code before the first
// copy comes from DRAM, so it has no division.
template <int kRows, int kColumns, class Params>
struct BatchedTilesOf {
  const Params& p;
  int next_tile, step;

  FI_DEVICE explicit BatchedTilesOf(const Params& params) : p(params), next_tile(blockIdx.x), step(gridDim.x) {}

  FI_DEVICE bool next(GemmTile& tile) {
    const GemmRaster& r = p.raster;
    for (; next_tile < r.all; next_tile += step) {
      int batch = 0, at = next_tile;
      if (r.all > r.tiles) batch = divide(at, r.by_tiles), at -= batch * r.tiles;
      const int first = divide(at, r.by_group) * r.group_m;
      const bool last = first + r.group_m > r.m_tiles;
      at -= first * r.n_tiles;
      const int column = divide(at, last ? r.by_last : r.by_rows);
      tile.row = (first + at - column * (last ? r.m_tiles - first : r.group_m)) * kRows;
      tile.column = column * kColumns;
      tile.rows = p.problem.m - tile.row;
      // Written so, mainloops compile as without it; as a minimum of rows, block scales with 64 x 128 take 5-8 %
      // longer.
      const int early = max(tile.row - p.last_row, 0);
      tile.row -= early, tile.rows += early;
      tile.a_batch = tile.b_batch = batch;
      if (p.problem.rows == GemmRows::kIndices) {
        tile.b_batch = p.problem.row_groups[tile.row];
        tile.a_batch = 0;
        if (tile.b_batch < 0) continue;
      }
      next_tile += step;
      return true;
    }
    return false;
  }
};

// Tiles of groups whose sizes are on the device. A warp looks at 32 groups at a time: lane l at group first_group + l.
// It looks again for every tile, which costs fewer registers than it does time.
template <int kRows, int kColumns, class Params>
struct GroupTilesOf {
  const Params& p;
  int next_tile;  // counted from the first tile of first_group on
  int first_group = 0;

  FI_DEVICE explicit GroupTilesOf(const Params& params) : p(params), next_tile(blockIdx.x) {}

  // By whole warps.
  FI_DEVICE bool next(GemmTile& tile) {
    const int n_tiles = (p.problem.n + kColumns - 1) / kColumns;
    int row, rows, end;
    for (;;) {
      look(n_tiles, row, rows, end);
      const int all = __shfl_sync(0xffffffffu, end, 31);
      if (next_tile < all) break;
      first_group += 32;
      next_tile -= all;
      if (first_group >= p.problem.batch) return false;
    }
    const int lane = __popc(__ballot_sync(0xffffffffu, end <= next_tile));
    const int group_rows = uniform(__shfl_sync(0xffffffffu, rows, lane)), m_tiles = (group_rows + kRows - 1) / kRows;
    const int before = uniform(__shfl_sync(0xffffffffu, end, lane)) - m_tiles * n_tiles;
    const GroupedRaster raster{m_tiles, n_tiles, p.group_m};
    const GroupedRaster::Tile at = raster.at(next_tile - before);
    tile.row = uniform(__shfl_sync(0xffffffffu, row, lane)) + at.m * kRows;
    tile.column = at.n * kColumns;
    tile.rows = group_rows - at.m * kRows;
    const int group = first_group + lane;
    tile.b_batch = p.problem.b_indices ? uniform(p.problem.b_indices[group]) : group;
    tile.a_batch = p.problem.rows == GemmRows::kMasked ? group : 0;
    next_tile += gridDim.x;
    return true;
  }

 private:
  // Of this lane's group: its rows, and the tiles of the 32 groups up to its end.
  FI_DEVICE void look(int n_tiles, int& row, int& rows, int& end) const {
    const int lane = threadIdx.x % 32, group = first_group + lane;
    row = rows = 0;
    if (group < p.problem.batch) {
      if (p.problem.rows == GemmRows::kMasked) {
        rows = min(p.problem.row_groups[group], p.problem.m);
      } else {
        row = p.problem.row_groups[group];
        rows = min(p.problem.row_groups[group + 1], p.problem.m) - row;
      }
    }
    end = (rows + kRows - 1) / kRows * n_tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += x;
    }
  }
};

template <int kRows, int kColumns>
using BatchedTiles = BatchedTilesOf<kRows, kColumns, GemmSm90Params>;
template <int kRows, int kColumns>
using GroupTiles = GroupTilesOf<kRows, kColumns, GemmSm90Params>;

}  // namespace fi
