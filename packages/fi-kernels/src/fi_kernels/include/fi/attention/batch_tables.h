// What the requests of a batch share besides their AttentionProblem: pages, scales on the device, and masks.
#pragma once
#include "fi/divisor.h"
#include "fi/types.h"

namespace fi {

// Token j of a request is in slot j % page_size of page page_indices[first_page + j / page_size]. Strides in elements.
struct PagedKeys {
  const int32_t* page_indices;  // null: ragged keys
  Divisor page_size;
  int64_t k_page, v_page;
  uint32_t last_page;      // num_pages - 1
  int32_t v_table_offset;  // entries from the page table of K to that of V; 0: they are the same
};

struct DeviceScales {
  const float* sinks;  // [qo_heads], natural logarithms; null: none
  const float* bmm1;   // multiplies the scores; null: 1
  const float* bmm2;   // multiplies the output; null: 1
};

struct MaskTables {
  const uint8_t* mask;        // null: none. With offsets, packed [qo_len, kv_len] of each request, from a new byte on
  const int32_t* offsets;     // [batch + 1], bytes; null: mask is [tokens, draft_row], as Mask::draft
  const int32_t* prefix_len;  // [batch]; null: no items
  const uint16_t* items;      // [batch, items_row], as Mask::items
  int32_t items_row, draft_row;
};

}  // namespace fi
