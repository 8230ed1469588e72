// Parameters of the append kernel, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// One of K and V. Strides and sizes in bytes: the copy does not know dtypes.
struct AppendSide {
  const char* from;  // [rows, heads, bytes]
  char* to;          // [pages, slots, heads, bytes], whatever the order in memory
  int64_t from_row, from_head, to_page, to_slot, to_head;
  int32_t bytes;  // of one head
};

// Row i goes to slot t % page_size of page kv_indices[kv_indptr[b] + t / page_size], where t = positions[i] and
// b = batch_indices[i]; it is skipped if b < 0.
struct AppendParams {
  AppendSide k, v;
  const int32_t *batch_indices, *positions, *kv_indices, *kv_indptr;
  int64_t rows;
  Divisor page_size;
  int32_t heads;
  int32_t lanes;  // threads a row
};

}  // namespace fi
