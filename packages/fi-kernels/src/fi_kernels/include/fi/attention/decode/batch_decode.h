// Parameters of batch_decode, shared by launcher, device code and CPU code.
#pragma once
#include "fi/attention/decode/decode_schedule.h"
#include "fi/attention/problem.h"
#include "fi/attention/softmax.h"
#include "fi/divisor.h"
#include "fi/tensor_map.h"

namespace fi {

// Row i of request b is row b * q_len + i of q and out, or row qo_indptr[b] + i where requests differ. Token j of a
// request is in page page_indices[first_page + j / page_size], slot j % page_size.
struct BatchDecodeParams {
  TensorMap k_map, v_map;    // for the kernels that load by TMA
  AttentionProblem problem;  // of request 0 and page 0; kv_len differs per request
  int64_t k_page, v_page;    // strides in elements
  const int32_t* page_indices;
  int32_t* schedule;
  float* workspace;           // [max_partials, kDecodeQTile, head_dim_vo + 2]
  const float* sinks;         // [qo_heads], natural logarithms; null: none
  const float* bmm1_scale;    // multiplies the scores; null: 1
  const float* bmm2_scale;    // multiplies the output; null: 1
  const uint8_t* draft_mask;  // [rows of q, draft_row] bytes; null: causal where q_len > 1
  const int32_t* qo_indptr;   // [batch + 1]; null: each request has mask.qo_len rows, else as many at most
  uint32_t last_page;         // num_pages - 1
  Divisor page_size, group_size, q_tiles_per_head;
  int32_t batch, num_ctas, num_ranges, draft_row;
  int32_t out_aligned;               // four elements of out may be stored at once
  int32_t box_keys_log2;             // one TMA copy loads 2^box_keys_log2 keys
  int32_t joined;                    // k_map loads NVFP4 keys and values: 1, or -1 if values are first; 0: only keys
  int32_t multiprocessors;           // of the device; fewer CTAs share it with another kernel
  int32_t evict_first_tiles;         // batches of fewer KV tiles are the first that L2 evicts
  int64_t index_bytes, query_bytes;  // from the first to the last element of page_indices and q
  int32_t v_table_offset;            // entries from the page table of K to that of V; 0: they are the same
  // NVFP4 with one query token: a q tile has the rows of this many kv heads, head after head. kv_head(q_tile) then
  // counts groups of heads, and group_size are the rows of a tile.
  int32_t heads_per_tile;

  FI_HOST_DEVICE DecodeSchedule view() const { return {schedule, num_ranges, batch}; }
  FI_HOST_DEVICE int32_t kv_head(int32_t q_tile) const {
    return static_cast<int32_t>(divide(static_cast<uint32_t>(q_tile), q_tiles_per_head));
  }
  FI_HOST_DEVICE int32_t first_row(int32_t q_tile) const {  // packed
    return (q_tile - kv_head(q_tile) * static_cast<int32_t>(q_tiles_per_head.value)) * kDecodeQTile;
  }
  FI_HOST_DEVICE Row row(int32_t kv_head, int32_t r) const {
    const auto i = static_cast<int32_t>(divide(static_cast<uint32_t>(r), group_size));
    return {i, kv_head * problem.group_size + (r - i * problem.group_size)};
  }

  // The partial of a split: row_max and row_sum of each row of the q tile, then their unnormalised output.
  FI_HOST_DEVICE float* partial_state(int32_t index) const {
    return workspace + static_cast<int64_t>(index) * kDecodeQTile * (problem.head_dim_vo + 2);
  }
  FI_HOST_DEVICE float* partial_output(int32_t index) const { return partial_state(index) + 2 * kDecodeQTile; }

  // The query tokens of request b: how many, and the row of q of the first.
  FI_HOST_DEVICE int32_t qo_len(int32_t b) const {
    if (!qo_indptr) return problem.mask.qo_len;
    const int32_t n = qo_indptr[b + 1] - qo_indptr[b];
    return n < problem.mask.qo_len ? n : problem.mask.qo_len;
  }
  FI_HOST_DEVICE int64_t first_token(int32_t b) const {
    return qo_indptr ? qo_indptr[b] : static_cast<int64_t>(b) * problem.mask.qo_len;
  }
  // Packed rows of a q tile: 0 if the request ends before it.
  FI_HOST_DEVICE int32_t rows(int32_t b, int32_t q_tile) const {
    const int32_t rest = qo_len(b) * static_cast<int32_t>(group_size.value) - first_row(q_tile);
    return rest <= 0 ? 0 : rest < kDecodeQTile ? rest : kDecodeQTile;
  }
  // The key after the last one of a work tile.
  FI_HOST_DEVICE int32_t end_key(const DecodeWorkTile& s) const {
    if (qo_indptr && rows(s.request, s.q_tile) == 0) return 0;  // no row attends to them
    const int64_t end = static_cast<int64_t>(s.end) * kDecodeKvTile;
    return end < s.kv_len ? static_cast<int32_t>(end) : s.kv_len;
  }

  // The scores and the mask of one request. bmm1: the value of bmm1_scale.
  FI_HOST_DEVICE AttentionProblem keys_of(int32_t b, int32_t kv_len, float bmm1) const {
    AttentionProblem p = problem;
    p.mask.kv_len = kv_len;
    p.mask.qo_len = qo_len(b);
    p.scores.sm_scale *= bmm1;
    if (draft_mask) p.mask.draft = draft_mask + first_token(b) * draft_row;
    return p;
  }

  // The attention problem of one request. Its k and v are not used: page_indices locates the pages.
  FI_HOST_DEVICE AttentionProblem request(int32_t b, int32_t kv_len, int64_t q_bytes, int64_t out_bytes) const {
    AttentionProblem p = keys_of(b, kv_len, bmm1_scale ? *bmm1_scale : 1.f);
    const int64_t row = first_token(b);
    p.q = static_cast<const char*>(p.q) + row * p.q_token * q_bytes;
    p.out = static_cast<char*>(p.out) + row * p.out_token * out_bytes;
    if (p.lse) p.lse += row * p.qo_heads;
    if (bmm2_scale) p.out_scale *= *bmm2_scale;
    return p;
  }
};

}  // namespace fi
