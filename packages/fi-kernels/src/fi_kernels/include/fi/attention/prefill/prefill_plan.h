// Parameters of the prefill planner, shared by launcher, device code and CPU code.
#pragma once
#include "fi/attention/prefill/prefill_schedule.h"

namespace fi {

struct PrefillPlanParams {
  PrefillSchedule schedule;
  const int32_t* qo_indptr;      // [batch + 1], tokens; null: qo_len each
  const int32_t* kv_indptr;      // [batch + 1], pages, or tokens of ragged keys; null: pages_per_request each
  const int32_t* last_page_len;  // [batch]; null: pages are full
  const int32_t* kv_len;         // [batch]; null: from the pages
  int32_t batch, qo_len, page_size, pages_per_request;  // page_size 1: ragged
  int32_t max_tiles;                                    // capacity of the schedule, in q tiles
  int32_t tile_tokens, kv_tile;
  int32_t short_tile_tokens;  // tokens of a q tile of two thirds of the rows, which the planner may choose; 0: none
  int32_t kv_heads;
  int32_t num_ctas;      // persistent CTAs
  int32_t max_partials;  // capacity of the workspace; 0: no split
  int32_t causal, window_left;

  // kv_len is at most what the pages hold, so that kernels read no page id of another request.
  FI_HOST_DEVICE PrefillRequest request(int32_t b) const {
    const int32_t first = qo_indptr ? qo_indptr[b] : b * qo_len;
    const int32_t rows = qo_indptr ? difference(qo_indptr[b + 1], first) : qo_len;
    const int32_t begin = kv_indptr ? kv_indptr[b] : b * pages_per_request;
    const int32_t entries = kv_indptr ? difference(kv_indptr[b + 1], begin) : pages_per_request;
    const int64_t most = static_cast<int64_t>(entries) * page_size;
    int64_t length = most;
    if (kv_len)
      length = kv_len[b];
    else if (last_page_len)
      length += static_cast<int64_t>(last_page_len[b]) - page_size;
    if (length > most) length = most;
    if (length > 0x7fffffff) length = 0x7fffffff;
    return {first, rows > 0 ? rows : 0, begin, entries > 0 && length > 0 ? static_cast<int32_t>(length) : 0};
  }
  // Of offsets that may lie.
  FI_HOST_DEVICE static int32_t difference(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
  }
  FI_HOST_DEVICE static int32_t tiles(const PrefillRequest& r, int32_t tokens) {
    return r.qo_len > 0 ? (r.qo_len - 1) / tokens + 1 : 0;
  }
  // The KV tiles that a q tile of `tokens` tokens reads.
  FI_HOST_DEVICE int32_t kv_tiles(const PrefillRequest& r, int32_t tile, int32_t tokens) const {
    const Mask mask = Mask::of_range(causal, window_left, r.qo_len, r.kv_len);
    const int32_t first = tile * tokens, after = first + tokens;
    const int32_t last = (after < r.qo_len ? after : r.qo_len) - 1;
    const uint32_t end = static_cast<uint32_t>(mask.end_key(last)), tile_keys = static_cast<uint32_t>(kv_tile);
    return static_cast<int32_t>((end + tile_keys - 1) / tile_keys) - mask.first_key(first) / kv_tile;
  }
};

// Splits are for work tiles of kMinSplitTiles KV tiles or more. kSplitCost: the KV tiles that take as long as writing
// and merging a partial (H200, estimated). kMaxSplits is less than 32.
constexpr int32_t kMinSplitTiles = 16, kMaxSplits = 16;
constexpr float kSplitCost = 2.f;

// The q tiles of a batch at one tile height. work: the KV tiles that one kv head reads; longest: those of one q tile.
struct PrefillTileStats {
  int64_t work;
  int32_t num_tiles, longest;
};

// The split of the last work tiles, from number `first` on. All of them have the same num_splits; the longest reads
// kv_tiles KV tiles, and full_tiles work tiles of that length are as much work as all of them. CTAs run the tiles
// before `first` unsplit.
struct PrefillSplit {
  int32_t first, num_tiles, full_tiles, kv_tiles, num_ctas, max_partials;

  static constexpr uint32_t kNever = 0xffffffffu;

  // Splits the tiles of the last wave, which does not fill the CTAs; or all tiles, if the longest one takes longer than
  // the average CTA.
  FI_HOST_DEVICE static PrefillSplit of(const PrefillTileStats& tiles, int32_t kv_heads, int32_t num_ctas,
                                        int32_t max_partials) {
    const int32_t count = tiles.num_tiles * kv_heads, last_wave = count % num_ctas;
    const int64_t work = tiles.work * kv_heads;
    PrefillSplit split{count - last_wave, last_wave, last_wave, 0, num_ctas, max_partials};
    if (count <= num_ctas || (count <= PrefillSchedule::kMaxSplitTiles && tiles.longest > work / num_ctas)) {
      const int32_t full = tiles.longest > 0 ? static_cast<int32_t>((work + tiles.longest - 1) / tiles.longest) : 0;
      split = {0, count, full, tiles.longest, num_ctas, max_partials};
    } else {
      split.kv_tiles = static_cast<int32_t>((tiles.work + tiles.num_tiles - 1) / tiles.num_tiles);
    }
    return split;
  }

  // The time with num_splits in quarters of a KV tile, for comparison. The low five bits are num_splits.
  FI_HOST_DEVICE uint32_t cost(int32_t num_splits) const {
    if (num_splits > 1 && (num_tiles > PrefillSchedule::kMaxSplitTiles || kv_tiles < kMinSplitTiles ||
                           num_splits > kMaxSplits || num_tiles * num_splits > max_partials))
      return kNever;
    const int32_t each = (kv_tiles + num_splits - 1) / num_splits;
    const int32_t waves = (full_tiles * num_splits + num_ctas - 1) / num_ctas;
    const float merging = num_splits > 1 ? kSplitCost + 0.25f * static_cast<float>(num_splits) : 0.f;
    const float time = static_cast<float>(waves) * (static_cast<float>(each) + merging);
    return static_cast<uint32_t>((time < 1e7f ? time : 1e7f) * 4) * 32 + static_cast<uint32_t>(num_splits);
  }
  FI_HOST_DEVICE static int32_t num_splits(uint32_t cost) { return static_cast<int32_t>(cost % 32); }
  FI_HOST_DEVICE static float time(uint32_t cost) { return 0.25f * static_cast<float>(cost / 32); }
};

// The time of all work tiles in KV tiles. best_cost(split): the least cost over all num_splits.
template <class BestCost>
FI_HOST_DEVICE float prefill_time(const PrefillTileStats& tiles, const PrefillSplit& split, int32_t kv_heads,
                                  const BestCost& best_cost) {
  const float longest = static_cast<float>(tiles.longest), num_ctas = static_cast<float>(split.num_ctas);
  const float mean = static_cast<float>(tiles.work) / static_cast<float>(tiles.num_tiles ? tiles.num_tiles : 1);
  if (split.max_partials > 0 && tiles.longest >= kMinSplitTiles)
    return mean * static_cast<float>(split.first) / num_ctas + PrefillSplit::time(best_cost(split));
  if (split.first + split.num_tiles <= split.num_ctas) return longest;
  // A CTA ends half a tile after the mean, on average.
  const float uneven = static_cast<float>(tiles.work) * static_cast<float>(kv_heads) / num_ctas + mean / 2;
  return uneven > longest ? uneven : longest;
}

// Whether tiles of two thirds of the rows end sooner. Such a tile takes 0.78 of the time of a full one for a KV tile
// (docs/notes/prefill-schedule.md).
template <class BestCost>
FI_HOST_DEVICE bool prefers_short(const PrefillTileStats& full, const PrefillTileStats& low, int32_t kv_heads,
                                  int32_t num_ctas, int32_t max_partials, const BestCost& best_cost) {
  const auto time = [&](const PrefillTileStats& tiles) {
    return prefill_time(tiles, PrefillSplit::of(tiles, kv_heads, num_ctas, max_partials), kv_heads, best_cost);
  };
  return 0.78f * time(low) < time(full);
}

}  // namespace fi
