// TMA copies of whole tiles in the 128-byte swizzle: one box of 128-byte columns for each column block of a tile.
#pragma once
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/swizzle.cuh"

namespace fi {

// Loads kColumns columns from `column` on; column blocks are `block_stride` elements apart in shared memory (kRows *
// 128 bytes in a SwizzledTile<T, kRows>). outer: the coordinates above the column, then an L2 policy for five of them
// in all. The bytes complete on `full`. By one thread.
template <int kColumns, class T, class... Outer>
FI_DEVICE void tma_load_tile(T* tile, int block_stride, const TensorMap& map, Barrier& full, int column,
                             Outer... outer) {
  constexpr int kBlockColumns = kSwizzleLineBytes / sizeof(T);
#pragma unroll
  for (int block = 0; block * kBlockColumns < kColumns; ++block)
    tma_load(tile + block * block_stride, map, full, column + block * kBlockColumns, outer...);
}

}  // namespace fi
