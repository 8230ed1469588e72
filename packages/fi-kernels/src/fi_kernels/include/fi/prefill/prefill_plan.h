// Parameters of the prefill planner, shared by launcher, device code and CPU code.
#pragma once
#include "fi/prefill/schedule.h"

namespace fi {

struct PrefillPlanParams {
  PrefillSchedule schedule;
  const int32_t* qo_indptr;      // [batch + 1], tokens
  const int32_t* kv_indptr;      // [batch + 1], pages, or tokens of ragged keys; null: pages_per_request each
  const int32_t* last_page_len;  // [batch], of requests with pages; null: kv_len says
  const int32_t* kv_len;         // [batch]; null: from kv_indptr
  int32_t batch, page_size, pages_per_request;
  int32_t tile_tokens, key_tile;
  int32_t causal, window_left;

  FI_HOST_DEVICE PrefillRequest request(int32_t b) const {
    const int32_t begin = kv_indptr ? kv_indptr[b] : b * pages_per_request;
    int32_t length;
    if (kv_len) {
      length = kv_len[b];
    } else {
      const int32_t entries = kv_indptr[b + 1] - begin;
      length = !last_page_len ? entries : entries > 0 ? (entries - 1) * page_size + last_page_len[b] : 0;
    }
    return {qo_indptr[b], qo_indptr[b + 1] - qo_indptr[b], begin, length};
  }
  FI_HOST_DEVICE int32_t tiles(const PrefillRequest& r) const { return (r.qo_len + tile_tokens - 1) / tile_tokens; }
  // Key tiles that a tile of query rows reads.
  FI_HOST_DEVICE int32_t work(const PrefillRequest& r, int32_t tile) const {
    const Mask mask{nullptr, 0, 0, causal, window_left, r.qo_len, r.kv_len};
    const int32_t first = tile * tile_tokens, after = first + tile_tokens;
    const int32_t last = (after < r.qo_len ? after : r.qo_len) - 1;
    return (mask.end_key(last) + key_tile - 1) / key_tile - mask.first_key(first) / key_tile;
  }
};

}  // namespace fi
