// Addresses of KV tokens: token j is page(j) page strides plus slot(j) token strides after the beginning of the cache.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/divisor.h"

namespace fi {

// Contiguous KV: one page, token j in slot j.
struct ContiguousKv {
  static constexpr int64_t k_page = 0, v_page = 0;
  FI_DEVICE int64_t page(int) const { return 0; }
  FI_DEVICE int slot(int j) const { return j; }
};

// Token j of a request is in slot j % size of page ids[j / size]. An id outside of the cache reads the last page: a
// wrong table gives wrong results, not an illegal access that ends the process.
struct PagedKv {
  const int32_t* ids;
  uint32_t last_page;
  Divisor size;
  int64_t k_page, v_page;
  FI_DEVICE int64_t page(int j) const { return min(static_cast<uint32_t>(ids[divide(j, size)]), last_page); }
  FI_DEVICE int slot(int j) const { return j - static_cast<int>(divide(j, size) * size.value); }
};

}  // namespace fi
