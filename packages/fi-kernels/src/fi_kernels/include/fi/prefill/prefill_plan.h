// Parameters of the prefill planner, shared by launcher, device code and CPU code.
#pragma once
#include "fi/prefill/schedule.h"

namespace fi {

struct PrefillPlanParams {
  PrefillSchedule schedule;
  const int32_t* qo_indptr;      // [batch + 1], tokens; null: qo_len each
  const int32_t* kv_indptr;      // [batch + 1], pages, or tokens of ragged keys; null: pages_per_request each
  const int32_t* last_page_len;  // [batch]; null: pages are full
  const int32_t* kv_len;         // [batch]; null: from the pages
  int32_t batch, qo_len, page_size, pages_per_request;  // page_size 1: ragged
  int32_t capacity;                                     // items that the schedule has room for
  int32_t tile_tokens, key_tile;
  int32_t causal, window_left;

  // A request has no more tokens than its pages hold, whatever its length says: nothing behind its page ids is read.
  FI_HOST_DEVICE PrefillRequest request(int32_t b) const {
    const int32_t first = qo_indptr ? qo_indptr[b] : b * qo_len, rows = qo_indptr ? qo_indptr[b + 1] - first : qo_len;
    const int32_t begin = kv_indptr ? kv_indptr[b] : b * pages_per_request;
    const int32_t entries = kv_indptr ? kv_indptr[b + 1] - begin : pages_per_request;
    const int64_t most = static_cast<int64_t>(entries) * page_size;
    int64_t length = most;
    if (kv_len)
      length = kv_len[b];
    else if (last_page_len)
      length += last_page_len[b] - page_size;
    if (length > most) length = most;
    return {first, rows > 0 ? rows : 0, begin, entries > 0 && length > 0 ? static_cast<int32_t>(length) : 0};
  }
  FI_HOST_DEVICE int32_t tiles(const PrefillRequest& r) const { return (r.qo_len + tile_tokens - 1) / tile_tokens; }
  // Key tiles that a tile of query rows reads.
  FI_HOST_DEVICE int32_t work(const PrefillRequest& r, int32_t tile) const {
    const Mask mask = Mask::of_range(causal, window_left, r.qo_len, r.kv_len);
    const int32_t first = tile * tile_tokens, after = first + tile_tokens;
    const int32_t last = (after < r.qo_len ? after : r.qo_len) - 1;
    return (mask.end_key(last) + key_tile - 1) / key_tile - mask.first_key(first) / key_tile;
  }
};

}  // namespace fi
