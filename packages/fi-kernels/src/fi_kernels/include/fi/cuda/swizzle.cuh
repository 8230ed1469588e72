// The 128-byte swizzle that TMA, wgmma and ldmatrix share: the offset of an element of a tile in shared memory.
#pragma once
#include "fi/types.h"

namespace fi {

// A swizzled tile is a sequence of lines of 128 bytes. A line has eight chunks of 16 bytes, and chunk c of line l lies
// at place c ^ (l % 8): eight consecutive lines hold one chunk in eight different groups of banks. TMA and wgmma derive
// the pattern from address bits 7 to 9, so a tile begins at a multiple of 1024 bytes.
constexpr int kSwizzleLineBytes = 128, kSwizzlePeriod = 1024;

FI_HOST_DEVICE int swizzled_chunk(int line, int chunk) { return chunk ^ line % 8; }

// The byte offset of a chunk in its tile.
FI_HOST_DEVICE int swizzled_offset(int line, int chunk) { return line * 128 + (swizzled_chunk(line, chunk) << 4); }

// A tile of kRows rows and any number of columns, as TMA boxes of 128-byte columns leave it: [column block][row][128
// bytes]. A row of one block is one line.
template <class T, int kRows>
struct SwizzledTile {
  static constexpr int kBlockColumns = kSwizzleLineBytes / sizeof(T), kChunkColumns = 16 / sizeof(T);
  static constexpr int kBlockBytes = kRows * kSwizzleLineBytes;

  // The byte offset of element (row, column).
  FI_HOST_DEVICE static int offset(int row, int column) {
    const int chunk = column % kBlockColumns / kChunkColumns,
              byte = column % kChunkColumns * static_cast<int>(sizeof(T));
    return column / kBlockColumns * kBlockBytes + swizzled_offset(row, chunk) + byte;
  }
};

}  // namespace fi
