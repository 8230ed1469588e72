// A tile of the Hopper GEMM: its shape, what a consumer warpgroup has of it, and the ring of its operands.
#pragma once
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/gemm/work_tiles.cuh"

namespace fi {

// kRows x kColumns of out for two consumer warpgroups, which lie beside each other along m, or along n where a tile has
// 64 rows. kStages: of the ring, each of 128 bytes of k. kGated: the columns are, for each warpgroup along n, kHalf
// rows of b and those n / 2 further, which are two projections of the same features.
template <int kTileRows, int kTileColumns, int kRingStages, bool kTwoProjections = false>
struct GemmTileSm90 {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kStages = kRingStages, kConsumers = 2;
  static constexpr bool kGated = kTwoProjections;
  static constexpr int kWarpgroupsM = kRows > 64 ? 2 : 1;
  // Of a warpgroup. kHalf: columns of a projection.
  static constexpr int kOwnRows = kRows / kWarpgroupsM, kOwnColumns = kColumns * kWarpgroupsM / kConsumers;
  static constexpr int kHalf = kOwnColumns / 2;
  static constexpr int kBoxes = kColumns > 256 ? 2 : 1;  // of b: TMA loads 256 rows at most
  static_assert(kColumns % (8 * kBoxes) == 0, "whole periods of the swizzle");
  static_assert(!kGated || kOwnRows == 64, "64 rows of a warpgroup");

  FI_DEVICE static int row(int warpgroup) { return warpgroup % kWarpgroupsM * kOwnRows; }
  FI_DEVICE static int column(int warpgroup) { return warpgroup / kWarpgroupsM * kOwnColumns; }
  // The first row of b of kHalf columns of a gated tile: both projections of a warpgroup, then of the next.
  FI_DEVICE static int row_of_b(const GemmTile& tile, int i, int n) {
    return tile.column / 2 + i / 2 * kHalf + i % 2 * (n / 2);
  }

  struct Operands {
    alignas(1024) char a[kStages][kRows * kSwizzleLineBytes];
    alignas(1024) char b[kStages][kColumns * kSwizzleLineBytes];
  };
  struct Ring {
    GemmTile tiles[kStages];  // of a stage that is the first of a tile
    Pipeline<kStages, Writer::kCopies, Reader::kBoth> pipeline;

    // By a warp, which no longer reads the stage. held: what stores the tile releases it.
    FI_DEVICE void release(int stage, bool held = false) {
      __syncwarp();
      if (threadIdx.x % 32 == 0 && !held) pipeline.release(stage);  // order: lane: as Pipeline::release_warp
    }
  };
};

}  // namespace fi
