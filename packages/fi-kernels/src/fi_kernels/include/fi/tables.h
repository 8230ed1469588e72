// Arguments whose dtype a kernel reads at run time: indices of 32 or 64 bits, and numbers of 16 or 32 bits.
#pragma once
#include "fi/types.h"

namespace fi {

// Indices of state slots: [rows] or [rows, columns], with any strides. Absent if data is null.
struct IndexTable {
  const void* data;
  int64_t row_stride, column_stride;
  bool is_wide;

  FI_HOST_DEVICE int64_t at(int64_t row, int64_t column = 0) const {
    const int64_t i = row * row_stride + column * column_stride;
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  // The row itself if there is no table.
  FI_HOST_DEVICE int64_t or_row(int64_t row, int64_t column = 0) const { return data ? at(row, column) : row; }
};

enum class NumberType : int32_t { kF32, kF16, kBF16 };

// Numbers such as gates: an address and the type of its elements. Absent if data is null.
struct Numbers {
  const void* data;
  NumberType type;
};

}  // namespace fi
