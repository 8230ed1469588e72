// Rows of memory that a product on the CPU prefetches while it computes.
#pragma once

#include <cstdint>

#include "fi/cpu/target.h"

namespace fi::cpu {

// Some lines a step: the line-fill buffers take few at once.
struct Prefetch {
  const char* from = nullptr;
  int64_t stride = 0, row_bytes = 0, rows = 0;  // bytes
  int64_t row = 0, at = 0;

  FI_INLINE void lines(int64_t count) {
    for (; count > 0 && row < rows; --count) {
      __builtin_prefetch(from + row * stride + at, 0, 2);
      if ((at += 64) >= row_bytes) at = 0, ++row;
    }
  }
  // Lines of each of so many steps.
  FI_INLINE int64_t each(int64_t steps) const { return (rows * row_bytes / 64 + steps - 1) / steps; }
};

}  // namespace fi::cpu
