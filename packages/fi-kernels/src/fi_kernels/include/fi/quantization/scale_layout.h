// Formats of block scales and their layouts in memory, shared by launchers, CPU kernels and device code.
#pragma once
#include "fi/types.h"

namespace fi {

// How the scale of a block is computed and stored. The values are those of fi_core.quantization.ops.
enum ScaleFormat : int32_t {
  kE4m3Scale = 0,        // e4m3(global_scale * amax / 6): NVFP4
  kUe8m0Scale = 1,       // the exponent of 2^ceil(log2(amax / limit)): MXFP4, MXFP8
  kFloatScale = 2,       // fp32, max(amax, eps) / limit
  kPowerOfTwoScale = 3,  // fp32, 2^ceil(log2(max(amax, eps) / limit))
};

// The values are those of SfLayout. The swizzled layouts store tiles of 128 or 8 rows and 4 columns; rows and columns
// are padded to whole tiles.
enum ScaleLayout : int32_t { kScales128x4 = 0, kScales8x4 = 1, kScalesLinear = 2 };

// Rows of the matrix are padded to a multiple of this, columns to a multiple of 4 (linear: of 1).
FI_HOST_DEVICE int32_t scale_tile_rows(int32_t layout) {
  return layout == kScales128x4 ? 128 : layout == kScales8x4 ? 8 : 1;
}

// Offset of one scale; `columns` is the padded number of columns.
FI_HOST_DEVICE int64_t scale_offset(int32_t layout, int32_t row, int32_t column, int32_t columns) {
  if (layout == kScalesLinear) return static_cast<int64_t>(row) * columns + column;
  if (layout == kScales8x4)
    return static_cast<int64_t>(row / 8) * columns * 8 + column / 4 * 32 + row % 8 * 4 + column % 4;
  return static_cast<int64_t>(row / 128) * columns * 128 + column / 4 * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
         column % 4;
}

}  // namespace fi
