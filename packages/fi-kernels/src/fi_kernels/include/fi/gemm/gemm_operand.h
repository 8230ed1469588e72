// Tensor maps of the operands of products on Hopper, made by launchers.
#pragma once
#include <algorithm>

#include "fi/host/kernel.h"

namespace fi {
#if FI_CUDA

// Describes [batch, rows, columns] of elements of so many bytes for boxes of 128 bytes by box_rows; strides in
// elements. TMA knows no 32-bit floats here: they are pairs of 16-bit elements.
inline void describe_operand(const Kernel& kernel, TensorMap& map, const void* data, int64_t bytes, int64_t columns,
                             int64_t rows, int64_t batch, int64_t row_stride, int64_t batch_stride, int64_t box_rows) {
  const int64_t unit = std::min<int64_t>(bytes, 2), scale = bytes / unit;
  const uint64_t sizes[] = {static_cast<uint64_t>(columns * scale), static_cast<uint64_t>(rows),
                            static_cast<uint64_t>(batch)};
  const uint64_t strides[] = {static_cast<uint64_t>(rows > 1 ? row_stride * bytes : 128),
                              static_cast<uint64_t>(batch > 1 ? batch_stride * bytes : 128)};
  const uint32_t box[] = {static_cast<uint32_t>(128 / unit), static_cast<uint32_t>(box_rows), 1};
  kernel.describe(map, unit, 3, const_cast<void*>(data), sizes, strides, box);
}

#endif
}  // namespace fi
