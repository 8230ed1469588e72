// Which work tile a persistent CTA takes next, from a counter; and the order in which a grid of tiles is walked.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

// Dynamic: CTAs take numbers from counters in global memory, which are 0 between launches. A CTA that begins with tile
// blockIdx.x without asking adds gridDim.x to each number.
FI_DEVICE int take_tile(int32_t* next) {
  delay<kDelayCounters>();
  return atomicAdd(next, 1);
}
// By one thread of each CTA, once it takes no more: the last of them makes the counters ready for the next launch.
FI_DEVICE void retire_cta(int32_t* next, int32_t* ctas_done) {
  if (atomicAdd(ctas_done, 1) == static_cast<int>(gridDim.x) - 1) *next = *ctas_done = 0;
}

// Grouped rasterisation of m_tiles x n_tiles: group_m rows of tiles are walked column by column, so that CTAs that run
// at the same time share operands in L2.
struct GroupedRaster {
  int m_tiles, n_tiles, group_m;

  struct Tile {
    int m, n;
  };
  FI_HOST_DEVICE int tiles() const { return m_tiles * n_tiles; }
  FI_HOST_DEVICE Tile at(int tile) const {
    if (m_tiles == 1) return {0, tile};  // without divisions, at the start of short kernels
    if (n_tiles == 1) return {tile, 0};
    const int group = tile / (group_m * n_tiles), first = group * group_m;
    const int rows = m_tiles - first < group_m ? m_tiles - first : group_m, rest = tile - first * n_tiles;
    return {first + rest % rows, rest / rows};
  }
};

}  // namespace fi
