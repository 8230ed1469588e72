// Parameters of the append_nvfp4_kv_cache kernels, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// Source and destination of K or of V: a block of 16 elements becomes 8 bytes of e2m1 and one e4m3 scale, or without
// scales 16 bytes of e4m3. Strides of src are in elements, the others in bytes.
struct Nvfp4AppendOperand {
  const char* src;             // [rows, heads, head_dim]
  uint8_t* dst;                // [pages, slots, heads, head_dim / 2, or head_dim] in any memory order
  uint8_t* scales;             // [pages, slots, heads, head_dim / 16] in any memory order; null: none
  const float* device_factor;  // one element, multiplies factor; null: 1
  int64_t src_row, src_head, dst_page, dst_slot, dst_head, scale_page, scale_slot, scale_head;
  float factor;    // value = e2m1 * scale * factor, or e4m3 * factor
  int32_t blocks;  // of one head
};

// Row i goes to slot t % page_size of page kv_indices[kv_indptr[b] + t / page_size], where t = positions[i] and
// b = batch_indices[i], or with `slots` to slot slots[i] % page_size of page slots[i] / page_size. A row with b < 0,
// with slots[i] < 0 or with no such page is skipped.
struct Nvfp4AppendParams {
  Nvfp4AppendOperand k, v;
  const int32_t *batch_indices, *positions, *kv_indices, *kv_indptr;
  const void* slots;  // int32 or int64; null: the tables above
  int64_t rows;
  uint32_t last_page;  // num_pages - 1
  Divisor page_size;
  int32_t heads, wide_slots;
  int32_t threads_per_row;  // within one CTA; blockIdx.y covers the rest of a row that is wider

  // The page of a row, -1 for none, and its slot.
  struct Place {
    int64_t page;
    int32_t slot;
  };
  FI_HOST_DEVICE Place place(int64_t row) const {
    if (slots) {
      const int64_t at = wide_slots ? static_cast<const int64_t*>(slots)[row] : static_cast<const int32_t*>(slots)[row];
      if (at < 0) return {-1, 0};
      const int64_t page = at < 0x7fffffff ? divide(static_cast<uint32_t>(at), page_size) : at / page_size.value;
      return {page <= last_page ? page : -1, static_cast<int32_t>(at - page * page_size.value)};
    }
    const int32_t b = batch_indices[row], t = positions[row];
    if (b < 0 || t < 0) return {-1, 0};
    const uint32_t pages = divide(static_cast<uint32_t>(t), page_size);
    const auto page = static_cast<uint32_t>(kv_indices[int64_t{kv_indptr[b]} + pages]);
    return {page <= last_page ? int64_t{page} : -1, t - static_cast<int32_t>(pages * page_size.value)};
  }
};

}  // namespace fi
