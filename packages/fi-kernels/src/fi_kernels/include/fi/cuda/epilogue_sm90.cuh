// The epilogue of a wgmma tile through shared memory: accumulators become 16-bit rows in the 128-byte swizzle, which a
// TMA store or coalesced row stores then move to global memory.
#pragma once
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/swizzle.cuh"

namespace fi {

// Stages the 64 x N accumulators of a warpgroup in rows [first_row, first_row + 64) of a SwizzledTile<T, kRows>.
// transform(x, row, column) gives the value to store: scales, bias, activation; row counts in the warpgroup's 64.
// first_row is a multiple of 16. Each warp writes 16 rows. Before a TMA store: fence_async_shared and a barrier of the
// warpgroup; before row stores by the same warp: __syncwarp.
template <class T, int kRows, int kCount, class Transform>
FI_DEVICE void stage_accumulators(T* tile, int first_row, const float (&d)[kCount], Transform&& transform) {
  static_assert(sizeof(T) == 2 && kCount % 8 == 0, "16-bit elements, 16 columns at a time");
  const int thread = threadIdx.x % 128, lane = thread % 32, warp_row = thread / 32 * 16;
  // Lanes 8 m .. 8 m + 7 give the rows of matrix m: rows 0 to 7 and 8 to 15 of 8 columns, then of the next 8.
  const int line = first_row + warp_row + lane / 8 % 2 * 8 + lane % 8, chunk = lane / 16;
  const int row = warp_row + lane / 4;
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = row + j % 2 * 8, column = i * 2 + j / 2 * 8 + lane % 4 * 2;
      words[j] = pack_pair(transform(d[i + 2 * j], at, column), transform(d[i + 2 * j + 1], at, column + 1), T());
    }
    char* to = reinterpret_cast<char*>(tile) + i * 2 / 64 * SwizzledTile<T, kRows>::kBlockBytes;
    stmatrix_x4(to + swizzled_offset(line, i / 4 % 8 + chunk), words);
  }
}

// Stores the rows that this warp has staged, 16 bytes a lane and whole rows of lanes side by side. row_pointer(row)
// gives where a row of the warpgroup's 64 goes, aligned to 16 bytes, or null: that row is not stored. columns: of the
// tile that exist, a multiple of 8.
template <class T, int kRows, int kColumns, class RowPointer>
FI_DEVICE void store_staged_rows(const T* tile, int first_row, int columns, RowPointer&& row_pointer) {
  constexpr int kChunks = kColumns / 8;
  const int thread = threadIdx.x % 128, warp_row = thread / 32 * 16;
#pragma unroll 4
  for (int i = thread % 32; i < 16 * kChunks; i += 32) {
    const int row = warp_row + i / kChunks, column = i % kChunks * 8;
    T* to = row_pointer(row);
    const char* from = reinterpret_cast<const char*>(tile) + SwizzledTile<T, kRows>::offset(first_row + row, column);
    if (to && column < columns) store_global(to + column, *reinterpret_cast<const uint4*>(from));
  }
}

}  // namespace fi
