// Batch prefill as the CPU form and the kernel for sm_80 take it: what requests have in common, and one of them.
#pragma once
#include "fi/attention/prefill/prefill_schedule.h"
#include "fi/attention/problem.h"
#include "fi/divisor.h"

namespace fi {

// Strides in elements. With pages, token j of a request is in slot j % page_size of pages[kv_begin + j / page_size].
struct PrefillProblem {
  AttentionProblem problem;  // q, out and lse of token 0; k and v of page 0, or of key 0; lengths are those of requests
  int64_t k_page, v_page;
  const int32_t* page_indices;  // null: ragged
  PrefillSchedule schedule;
  float* partials;             // workspace of the wgmma kernel for split-KV partials; null: no split
  const uint8_t* custom_mask;  // packed, flattened [qo_len, kv_len] of each request, which begins at a new byte; null
  const int32_t* mask_indptr;  // [batch + 1], bytes; null: custom_mask is [tokens, draft_row], as Mask::draft
  const int32_t* prefix_len;   // [batch]; null: no items
  const uint16_t* items;       // [batch, items_row], as Mask::items
  const float* sinks;          // [qo_heads], natural logarithms; null: none
  const float* bmm1_scale;     // multiplies the scores; null: 1
  const float* bmm2_scale;     // multiplies the output; null: 1
  Divisor page_size;
  uint32_t last_page;  // num_pages - 1
  int32_t tile_tokens, items_row, draft_row;
  int32_t padded_rows, batch;  // rows of the output, where rows of no request become 0; 0: they are not written
  int32_t v_table_offset;      // entries from the page table of K to that of V; 0: they are the same

  // The attention problem of one request, whose paged keys begin at pages + kv_begin.
  FI_HOST_DEVICE AttentionProblem request(int32_t b, int32_t q_bytes, int32_t kv_bytes, int32_t out_bytes) const {
    AttentionProblem p = problem;
    become(p, b, schedule.requests[b], q_bytes, kv_bytes, out_bytes);
    return p;
  }

  // Makes p, which is `problem` or that of another request, the problem of request b.
  FI_HOST_DEVICE void become(AttentionProblem& p, int32_t b, const PrefillRequest& r, int32_t q_bytes, int32_t kv_bytes,
                             int32_t out_bytes) const {
    p.q = static_cast<const char*>(problem.q) + r.qo_begin * p.q_token * q_bytes;
    p.out = static_cast<char*>(problem.out) + r.qo_begin * p.out_token * out_bytes;
    if (p.lse) p.lse = problem.lse + static_cast<int64_t>(r.qo_begin) * p.qo_heads;
    if (!page_indices) {
      p.k = static_cast<const char*>(problem.k) + r.kv_begin * p.k_token * kv_bytes;
      p.v = static_cast<const char*>(problem.v) + r.kv_begin * p.v_token * kv_bytes;
      p.kv_scales.k = problem.kv_scales.k + r.kv_begin * p.kv_scales.k_token;
      p.kv_scales.v = problem.kv_scales.v + r.kv_begin * p.kv_scales.v_token;
    }
    p.mask.qo_len = r.qo_len;
    p.mask.kv_len = r.kv_len;
    if (custom_mask && !mask_indptr) {
      p.mask.draft = custom_mask + static_cast<int64_t>(r.qo_begin) * draft_row;
      p.mask.draft_row = draft_row;
      if (r.qo_len > 8 * draft_row) p.mask.kv_len = 0;  // more rows than the mask has bits for: they see nothing
    } else if (custom_mask) {
      p.mask.custom = custom_mask + mask_indptr[b];
      p.mask.custom_row = r.kv_len;
      p.mask.custom_packed = 1;
    }
    if (items) {
      p.mask.items = items + static_cast<int64_t>(b) * items_row;
      p.mask.prefix_len = prefix_len[b];
    }
    if (bmm1_scale) p.scores.sm_scale = problem.scores.sm_scale * *bmm1_scale;
    if (bmm2_scale) p.out_scale = problem.out_scale * *bmm2_scale;
  }
};

}  // namespace fi
