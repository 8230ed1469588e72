// Binary searches: the last of increasing values that is not above another, and the segment of an indptr array.
#pragma once
#include "fi/types.h"

namespace fi {

// The last i < count with value(i) <= x; value(0) <= x, not decreasing.
template <class Value, class X>
FI_HOST_DEVICE int32_t last_not_above(int32_t count, X x, Value&& value) {
  int32_t low = 1, high = count;  // value(i) <= x for all i < low, > x for all i >= high
  while (low < high) {
    const int32_t middle = (low + high) >> 1;
    if (value(middle) <= x)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1;
}

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
