// Parameters of the append_paged_kv_cache kernels, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// Source and destination of K or of V. Strides and sizes are in bytes, because the kernels copy bytes of any dtype.
struct AppendOperand {
  const char* src;  // [rows, heads, head_bytes]
  char* dst;        // [pages, slots, heads, head_bytes] in any memory order
  int64_t src_row_stride, src_head_stride, dst_page_stride, dst_slot_stride, dst_head_stride;
  int32_t head_bytes;  // bytes of one head
};

// Row i goes to slot t % page_size of page kv_indices[kv_indptr[b] + t / page_size], where t = positions[i] and
// b = batch_indices[i]; a row with b < 0 or with no such page is skipped.
struct AppendParams {
  AppendOperand k, v;
  const int32_t *batch_indices, *positions, *kv_indices, *kv_indptr;
  int64_t rows;
  uint32_t last_page;  // num_pages - 1
  Divisor page_size;
  int32_t heads;
  int32_t threads_per_row;  // within one CTA; blockIdx.y covers the rest of a row that is wider
};

}  // namespace fi
