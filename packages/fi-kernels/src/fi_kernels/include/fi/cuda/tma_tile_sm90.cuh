// TMA copies of whole tiles in the 128-byte swizzle: one box of 128-byte columns for each column block of a tile.
#pragma once
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/swizzle.cuh"

namespace fi {

// Loads kColumns columns, whose column blocks are kBlockStride elements apart in shared memory (kRows * 128 bytes in a
// SwizzledTile<T, kRows>). `outer` are the coordinates above the column; the bytes complete on `full`. By one thread.
template <int kColumns, int kBlockStride, class T, class... Outer>
FI_DEVICE void tma_load_tile(T* tile, const TensorMap& map, Barrier& full, int column, Outer... outer) {
  constexpr int kBlockColumns = kSwizzleLineBytes / sizeof(T);
  static_assert(kColumns % kBlockColumns == 0, "whole column blocks");
#pragma unroll
  for (int block = 0; block < kColumns / kBlockColumns; ++block)
    tma_load(tile + block * kBlockStride, map, full, column + block * kBlockColumns, outer...);
}

// The same in the other direction, as part of this thread's bulk group. Elements outside of the tensor are dropped.
template <int kColumns, int kBlockStride, class T, class... Outer>
FI_DEVICE void tma_store_tile(const TensorMap& map, const T* tile, int column, Outer... outer) {
  constexpr int kBlockColumns = kSwizzleLineBytes / sizeof(T);
  static_assert(kColumns % kBlockColumns == 0, "whole column blocks");
#pragma unroll
  for (int block = 0; block < kColumns / kBlockColumns; ++block)
    tma_store(map, tile + block * kBlockStride, column + block * kBlockColumns, outer...);
}

}  // namespace fi
