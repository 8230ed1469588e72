// Which segment of an index pointer an element belongs to.
#pragma once
#include "fi/types.h"

namespace fi {

// The last i < count with indptr[i] <= at, which passes over empty segments; -1 if `at` is before the first segment or
// behind the last. indptr: [count + 1], not decreasing.
FI_HOST_DEVICE int32_t segment_of(const int32_t* indptr, int32_t count, int64_t at) {
  int32_t low = 0, high = count + 1;  // indptr[i] <= at for all i < low, > at for all i >= high
  while (low < high) {
    const int32_t middle = (low + high) >> 1;
    if (indptr[middle] <= at)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1 < count ? low - 1 : -1;
}

}  // namespace fi
