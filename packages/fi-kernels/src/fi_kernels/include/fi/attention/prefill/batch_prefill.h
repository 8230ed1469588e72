// Parameters of batch_prefill on Hopper, shared by launcher and device code; other forms take the problem as it is.
#pragma once
#include "fi/attention/prefill/prefill_problem.h"
#include "fi/divisor.h"
#include "fi/tensor_map.h"

namespace fi {

// Rows of keys or values for copies by cp.async; strides in bytes.
struct GatheredRows {
  const void* data;
  int64_t page, token, head;
};

// TMA reads q, k and v. q: [head_dim, query head of the kv head, kv head, token]. k and v: [head_dim, token of a page,
// kv head, page]; a copy loads 64 columns of `box_keys` keys, and ragged keys are one long page. Where pages are
// copied by whole rows, which takes fewer copies of small pages, k and v are [64 columns, 8 tokens, column blocks,
// groups of 8 tokens, page]: the kv head is part of the third coordinate (heads_in_column_blocks) or of the fourth
// (row_groups_per_head), and a copy loads `box_keys` whole rows. A row of 128 fp8 columns is one column block.
// Strides in elements.
struct BatchPrefillParams {
  TensorMap q, k, v;
  GatheredRows k_rows, v_rows;
  void* out;                    // [tokens, qo_heads, head_dim_vo]
  float* lse;                   // [tokens, qo_heads]; null: not wanted
  const float* sinks;           // [qo_heads]; null: none
  const int32_t* page_indices;  // null: ragged
  // For fp8 only, as in PrefillProblem; null: ones.
  const float* scale_q;
  const float* scale_k;
  const float* scale_v;
  const float* bmm1_scale;
  const float* bmm2_scale;
  PrefillSchedule schedule;
  float* partials;  // split-KV partials: [split tiles][max_splits][consumer warpgroups][kPartialFloat4s * 4]
  int64_t out_token, out_head;
  Divisor group_size, page_size;
  Divisor key_step;  // where a window begins, KV tiles begin at a multiple of it
  int32_t qo_heads, kv_heads;
  int32_t l2_kv_heads;  // kv heads whose keys and values fit into L2: the scheduler processes this many heads at a time
  int32_t tile_tokens;  // query tokens of a work tile, which has tile_tokens * group_size rows
  int32_t box_keys;     // keys of one TMA copy
  int32_t gathered;     // 1: pages are no whole groups of 8 keys, and cp.async copies k_rows and v_rows
  uint32_t last_page;   // as in PrefillProblem
  int32_t head_dim_vo, padded_rows, batch;  // as in PrefillProblem
  int32_t heads_in_column_blocks, row_groups_per_head;
  int32_t causal, window_left;
  OutType out_type;   // for fp8: fp16, bf16 or e4m3; else the type of q
  float score_scale;  // sm_scale * log2(e); with a soft cap, sm_scale / soft cap
  float soft_cap;     // times log2(e); 0: none
  float out_scale;
  int32_t v_table_offset;  // as in PrefillProblem
};

}  // namespace fi
