// Addresses of KV tokens: token j is page(j) page strides plus slot(j) token strides after the beginning of the cache.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/divisor.h"

namespace fi {

// Whether V has pages of its own: its page table begins v_table_offset entries behind that of K.
#if defined(FI_SPLIT_TABLES)
constexpr bool kSplitTables = true;
#else
constexpr bool kSplitTables = false;
#endif

// Contiguous KV: one page, token j in slot j.
struct ContiguousKv {
  static constexpr int64_t k_page = 0, v_page = 0;
  FI_DEVICE int64_t page(int) const { return 0; }
  FI_DEVICE int64_t v_page_of(int) const { return 0; }
  FI_DEVICE int slot(int j) const { return j; }
};

// Token j of a request is in slot j % size of page ids[j / size]. An id outside of the cache reads the last page: a
// wrong table gives wrong results, not an illegal access that ends the process.
struct PagedKv {
  const int32_t* ids;
  uint32_t last_page;
  Divisor size;
  int64_t k_page, v_page;
#if defined(FI_SPLIT_TABLES)
  int32_t v_table;
  FI_DEVICE void set_v_table(int32_t offset) { v_table = offset; }
  FI_DEVICE int64_t v_page_of(int j) const { return at(divide(j, size) + v_table); }
#else
  FI_DEVICE void set_v_table(int32_t) {}
  FI_DEVICE int64_t v_page_of(int j) const { return page(j); }
#endif
  FI_DEVICE int64_t page(int j) const { return at(divide(j, size)); }
  FI_DEVICE int slot(int j) const { return j - static_cast<int>(divide(j, size) * size.value); }

 private:
  FI_DEVICE int64_t at(uint32_t entry) const { return min(static_cast<uint32_t>(ids[entry]), last_page); }
};

}  // namespace fi
