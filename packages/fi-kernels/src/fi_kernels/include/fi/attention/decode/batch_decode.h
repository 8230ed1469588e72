// Parameters of batch_decode, shared by launcher, device code and CPU code.
#pragma once
#include "fi/attention/batch_tables.h"
#include "fi/attention/decode/decode_schedule.h"
#include "fi/attention/problem.h"
#include "fi/attention/softmax.h"
#include "fi/tensor_map.h"

namespace fi {

// Row i of request b is row b * q_len + i of q and out, or row qo_indptr[b] + i where requests differ.
// How the kernels for Hopper load keys and values by TMA, and which loads are kept in L2.
struct DecodeCopies {
  TensorMap k, v;
  int32_t box_keys_log2;             // one copy loads 2^box_keys_log2 keys
  int32_t joined;                    // k loads NVFP4 keys and values: 1, or -1 if values are first; 0: only keys
  int32_t multiprocessors;           // of the device; fewer CTAs share it with another kernel
  int32_t evict_first_tiles;         // batches of fewer KV tiles are the first that L2 evicts
  int64_t index_bytes, query_bytes;  // from the first to the last element of page_indices and q
};

struct BatchDecodeParams {
  DecodeCopies copies;
  AttentionProblem problem;  // of request 0 and page 0; kv_len differs per request
  PagedKeys pages;
  DeviceScales scales;
  MaskTables masks;  // mask without offsets, of the last qo_len keys; null: causal where qo_len > 1
  DecodeSchedule schedule;
  float* partials;           // [max_partials, kDecodeQTile, head_dim_vo + 2]
  const int32_t* qo_indptr;  // [batch + 1]; null: each request has mask.qo_len rows, else as many at most
  Divisor tile_group_size, q_tiles_per_head;
  int32_t num_ctas;
  int32_t out_aligned;  // four elements of out may be stored at once
  // NVFP4 with one query token: a q tile has the rows of this many kv heads, head after head. kv_head(q_tile) then
  // counts groups of heads, and tile_group_size are the rows of a tile.
  int32_t heads_per_tile;

  FI_HOST_DEVICE DecodeQueries queries() const { return {problem.mask.qo_len, problem.mask.window_left}; }
  FI_HOST_DEVICE int32_t kv_head(int32_t q_tile) const {
    return static_cast<int32_t>(divide(static_cast<uint32_t>(q_tile), q_tiles_per_head));
  }
  FI_HOST_DEVICE int32_t first_row(int32_t q_tile) const {  // packed
    return (q_tile - kv_head(q_tile) * static_cast<int32_t>(q_tiles_per_head.value)) * kDecodeQTile;
  }
  FI_HOST_DEVICE Row row(int32_t kv_head, int32_t r) const {
    const auto i = static_cast<int32_t>(divide(static_cast<uint32_t>(r), tile_group_size));
    return {i, kv_head * problem.group() + (r - i * problem.group())};
  }

  // The partial of a split: row_max and row_sum of each row of the q tile, then their unnormalised output.
  FI_HOST_DEVICE float* partial_state(int32_t index) const {
    return partials + static_cast<int64_t>(index) * kDecodeQTile * (problem.head_dim_vo + 2);
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
    const int32_t rest = qo_len(b) * static_cast<int32_t>(tile_group_size.value) - first_row(q_tile);
    return rest <= 0 ? 0 : rest < kDecodeQTile ? rest : kDecodeQTile;
  }
  // The key after the last one of a work tile.
  FI_HOST_DEVICE int32_t end_key(const DecodeWorkTile& s) const {
    if (qo_indptr && rows(s.request, s.q_tile) == 0) return 0;  // no row attends to them
    const int64_t end = static_cast<int64_t>(s.end) * kDecodeKvTile;
    return end < s.kv_len ? static_cast<int32_t>(end) : s.kv_len;
  }

  // The scores and the mask of one request. bmm1: the value of scales.bmm1.
  FI_HOST_DEVICE AttentionProblem keys_of(int32_t b, int32_t kv_len, float bmm1) const {
    AttentionProblem p = problem;
    p.mask.kv_len = kv_len;
    p.mask.qo_len = qo_len(b);
    p.scores.sm_scale *= bmm1;
    if (masks.mask) p.mask.draft = masks.mask + first_token(b) * masks.draft_row;
    return p;
  }

  // The attention problem of one request. Its k and v are not used: `pages` locates them.
  FI_HOST_DEVICE AttentionProblem request(int32_t b, int32_t kv_len, int64_t q_bytes, int64_t out_bytes) const {
    AttentionProblem p = keys_of(b, kv_len, scales.bmm1 ? *scales.bmm1 : 1.f);
    const int64_t row = first_token(b);
    p.q = static_cast<const char*>(p.q) + row * p.q_token * q_bytes;
    p.out = static_cast<char*>(p.out) + row * p.out_token * out_bytes;
    if (p.lse) p.lse += row * p.qo_heads;
    if (scales.bmm2) p.out_scale *= *scales.bmm2;
    return p;
  }
};

}  // namespace fi
