// Binary search for the segment of an indptr array that contains an element.
#pragma once
#include "fi/types.h"

namespace fi {

// Returns the i with indptr[i] <= element < indptr[i + 1]; -1 if the element is before the first segment or behind the
// last. Empty segments contain no element. indptr: [count + 1], not decreasing.
FI_HOST_DEVICE int32_t find_segment(const int32_t* indptr, int32_t count, int64_t element) {
  int32_t low = 0, high = count + 1;  // indptr[i] <= element for all i < low, > element for all i >= high
  while (low < high) {
    const int32_t middle = (low + high) >> 1;
    if (indptr[middle] <= element)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1 < count ? low - 1 : -1;
}

}  // namespace fi
