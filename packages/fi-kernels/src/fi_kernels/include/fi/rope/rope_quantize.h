// Parameters of rope with fp8 output, and the page table that gives the slot of a row in a paged cache.
#pragma once
#include "fi/rope/rope.h"

namespace fi {

// Row i belongs to slot t % page_size of page kv_indices[kv_indptr[b] + t / page_size], where t = positions[i] and
// b = batch_indices[i].
struct PageTable {
  IndexArray kv_indices, kv_indptr, batch_indices, positions;  // batch_indices.data is null without a paged cache
  int32_t page_size;
  int64_t num_pages;

  // Returns false if the row belongs to no request (b < 0) or its page does not exist.
  FI_HOST_DEVICE bool find(int64_t row, int64_t* page, int64_t* slot) const {
    const int64_t batch = batch_indices.at(row);
    if (batch < 0) return false;
    const auto token = static_cast<uint32_t>(positions.at(row)), nth = token / static_cast<uint32_t>(page_size);
    *page = kv_indices.at(kv_indptr.at(batch) + nth);
    *slot = token - nth * static_cast<uint32_t>(page_size);
    return *page >= 0 && *page < num_pages;
  }
};

struct RopeQuantizeParams {
  RopeCommon common;
  PageTable pages;  // of k and v; q is never paged
};

}  // namespace fi
