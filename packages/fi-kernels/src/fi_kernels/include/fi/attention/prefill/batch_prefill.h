// Parameters of batch_prefill, shared by launcher, device code and CPU code.
#pragma once
#include "fi/attention/batch_tables.h"
#include "fi/attention/prefill/prefill_schedule.h"
#include "fi/attention/problem.h"
#include "fi/tensor_map.h"

namespace fi {

// Rows of keys or values for copies by cp.async; strides in bytes.
struct GatheredRows {
  const void* data;
  int64_t page, token, head;
};

// How the wgmma kernels load q, k and v. By TMA, q: [head_dim, query head of the kv head, kv head, token]. k and v:
// [head_dim, token of a page, kv head, page]; a copy loads 64 columns of `box_keys` keys, and ragged keys are one long
// page. Where pages are copied by whole rows, which takes fewer copies of small pages, k and v are [64 columns,
// 8 tokens, column blocks, groups of 8 tokens, page]: the kv head is part of the third coordinate
// (heads_in_column_blocks) or of the fourth (row_groups_per_head), and a copy loads `box_keys` whole rows. A row of 128
// fp8 columns is one column block.
struct PrefillCopies {
  TensorMap q, k, v;
  GatheredRows k_rows, v_rows;
  HeadScores scores;    // of the factors that are numbers
  Divisor key_step;     // where a window begins, KV tiles begin at a multiple of it
  int32_t l2_kv_heads;  // kv heads whose keys and values fit into L2: the scheduler processes this many heads at a time
  int32_t box_keys;     // keys of one TMA copy
  int32_t gathered;     // 1: pages are no whole groups of 8 keys, and cp.async copies k_rows and v_rows
  int32_t heads_in_column_blocks, row_groups_per_head;
};

struct BatchPrefillParams {
  PrefillCopies copies;      // of the wgmma kernels
  AttentionProblem problem;  // q, out and lse of token 0; k and v of page 0, or of key 0; lengths are those of requests
  PagedKeys pages;           // strides 0 for ragged keys
  DeviceScales scales;
  MaskTables masks;
  PrefillSchedule schedule;
  float* partials;  // of split-KV: [split tiles][max_splits][consumer warpgroups][kPartialFloat4s * 4]; null: no split
  int32_t tile_tokens;  // query tokens of a work tile, which has tile_tokens * group_size rows
  int32_t padded_rows;  // rows of the output, where rows of no request become 0; 0: they are not written
  int32_t batch_size;

  // The attention problem of one request, whose paged keys begin at page_indices + kv_begin.
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
    if (!pages.page_indices) {
      p.k = static_cast<const char*>(problem.k) + r.kv_begin * p.k_token * kv_bytes;
      p.v = static_cast<const char*>(problem.v) + r.kv_begin * p.v_token * kv_bytes;
      p.kv_scales.k = problem.kv_scales.k + r.kv_begin * p.kv_scales.k_token;
      p.kv_scales.v = problem.kv_scales.v + r.kv_begin * p.kv_scales.v_token;
    }
    p.mask.qo_len = r.qo_len;
    p.mask.kv_len = r.kv_len;
    if (masks.mask && !masks.offsets) {
      p.mask.draft = masks.mask + static_cast<int64_t>(r.qo_begin) * masks.draft_row;
      p.mask.draft_row = masks.draft_row;
      if (r.qo_len > 8 * masks.draft_row) p.mask.kv_len = 0;  // more rows than the mask has bits for: they see nothing
    } else if (masks.mask) {
      p.mask.custom = masks.mask + masks.offsets[b];
      p.mask.custom_row = r.kv_len;
      p.mask.custom_packed = 1;
    }
    if (masks.items) {
      p.mask.items = masks.items + static_cast<int64_t>(b) * masks.items_row;
      p.mask.prefix_len = masks.prefix_len[b];
    }
    if (scales.bmm1) p.scores.sm_scale = problem.scores.sm_scale * *scales.bmm1;
    if (scales.bmm2) p.out_scale = problem.out_scale * *scales.bmm2;
  }
};

}  // namespace fi
