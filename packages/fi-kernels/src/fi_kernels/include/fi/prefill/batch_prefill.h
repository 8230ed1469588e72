// Parameters of batch_prefill on Hopper, shared by launcher and device code; other forms take the problem as it is.
#pragma once
#include "fi/divisor.h"
#include "fi/prefill/prefill_problem.h"
#include "fi/tensor_map.h"

namespace fi {

// q, k and v come through tensor maps: q [columns of a row, head of the group, kv head, token], k and v either
// [columns, token of a page, kv head, page], of which a copy brings 64 columns of `box` keys; ragged keys are one long
// page. Or, by whole rows, [64 columns, 8 tokens, blocks of 64 columns, groups of 8 tokens, page] with the kv head
// counted in along with the third or the fourth: a copy brings whole rows of `box` keys, which takes fewer copies of
// small pages. fp8 rows of 128 columns are whole at once, 128 columns a copy. Strides in elements.
struct BatchPrefillParams {
  TensorMap q, k, v;
  void* out;             // [tokens, qo_heads, dim_vo]
  float* lse;            // [tokens, qo_heads]; null: not wanted
  const float* sinks;    // [qo_heads]; null: none
  const int32_t* pages;  // null: ragged
  // Of fp8 alone, as in PrefillProblem; null: ones.
  const float* scale_q;
  const float* scale_k;
  const float* scale_v;
  const float* bmm1_scale;
  const float* bmm2_scale;
  PrefillSchedule schedule;
  float* parts;  // [split units][most parts of one][PrefillKernel::kPartFloats]
  int64_t out_token, out_head;
  Divisor group, page_size;
  int32_t qo_heads, kv_heads;
  int32_t section;                   // kv heads whose keys stay in L2 together: tiles are handed out section by section
  int32_t tile_tokens;               // query tokens of a tile: its rows are these times the group
  int32_t box;                       // keys of one copy
  int32_t dim_vo, rest_rows, batch;  // as PrefillProblem
  int32_t heads_in_blocks, head_groups;  // by whole rows: heads count in the third, or these groups each in the fourth
  int32_t causal, window_left;
  OutType out_type;  // of fp8: fp16, bf16 or e4m3; else that of q
  float scale;       // of scores, times log2(e); with a soft cap, divided by it
  float cap;         // times log2(e); 0: none
  float out_scale;
};

}  // namespace fi
