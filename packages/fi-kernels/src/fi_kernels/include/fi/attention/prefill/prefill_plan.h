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
  int32_t max_tiles;                                    // items that the schedule has room for
  int32_t tile_tokens, kv_tile;
  int32_t short_tokens;  // of a tile that may be taken instead, two thirds as high; 0: none
  int32_t kv_heads;
  int32_t num_ctas;      // that take units of work at a time
  int32_t max_partials;  // parts of units that there is room for; 0: units must not be split
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
  FI_HOST_DEVICE static int32_t tiles(const PrefillRequest& r, int32_t tokens) {
    return (r.qo_len + tokens - 1) / tokens;
  }
  // Key tiles that a tile of so many query tokens reads.
  FI_HOST_DEVICE int32_t kv_tiles(const PrefillRequest& r, int32_t tile, int32_t tokens) const {
    const Mask mask = Mask::of_range(causal, window_left, r.qo_len, r.kv_len);
    const int32_t first = tile * tokens, after = first + tokens;
    const int32_t last = (after < r.qo_len ? after : r.qo_len) - 1;
    return (mask.end_key(last) + kv_tile - 1) / kv_tile - mask.first_key(first) / kv_tile;
  }
};

// In key tiles: units of fewer are not split, and what a part costs for being written and merged (H200, estimated).
constexpr int32_t kMinSplitTiles = 16, kMaxSplits = 16;  // the latter below 32
constexpr float kSplitCost = 2.f;

// All tiles of a batch, of one height; work in key tiles, of one kv head.
struct PrefillTileStats {
  int64_t work;
  int32_t num_tiles, longest;
};

// The last work tiles, all with the same number of KV splits: `units` tiles, of which the longest reads `work` key
// tiles; `full` tiles of that length are as much work. CTAs run the unsplit tiles before and finish them together.
struct PrefillSplit {
  int32_t first, units, full, work, blocks, slots;

  static constexpr uint32_t kNever = 0xffffffffu;

  // Those of the last round, which would leave blocks idle; or all, where the longest alone takes longer than blocks
  // need on average.
  FI_HOST_DEVICE static PrefillSplit of(const PrefillTileStats& tiles, int32_t kv_heads, int32_t blocks,
                                        int32_t slots) {
    const int32_t units = tiles.num_tiles * kv_heads;
    const int64_t work = tiles.work * kv_heads;
    PrefillSplit split{units - units % blocks, units % blocks, units % blocks, 0, blocks, slots};
    if (units <= blocks || (units <= PrefillSchedule::kMaxSplitTiles && tiles.longest > work / blocks)) {
      const int32_t full = tiles.longest > 0 ? static_cast<int32_t>((work + tiles.longest - 1) / tiles.longest) : 0;
      split = {0, units, full, tiles.longest, blocks, slots};
    } else {
      split.work = static_cast<int32_t>((tiles.work + tiles.num_tiles - 1) / tiles.num_tiles);
    }
    return split;
  }

  // Time of units in so many parts, in quarters of a key tile, for comparison; the number of parts is in the low bits.
  FI_HOST_DEVICE uint32_t cost(int32_t parts) const {
    if (parts > 1 && (units > PrefillSchedule::kMaxSplitTiles || work < kMinSplitTiles || parts > kMaxSplits ||
                      units * parts > slots))
      return kNever;
    const int32_t keys = (work + parts - 1) / parts, rounds = (full * parts + blocks - 1) / blocks;
    const float time = static_cast<float>(rounds) *
                       (static_cast<float>(keys) + (parts > 1 ? kSplitCost + 0.25f * static_cast<float>(parts) : 0.f));
    return static_cast<uint32_t>((time < 1e7f ? time : 1e7f) * 4) * 32 + static_cast<uint32_t>(parts);
  }
  FI_HOST_DEVICE static int32_t parts(uint32_t cost) { return static_cast<int32_t>(cost % 32); }
  FI_HOST_DEVICE static float time(uint32_t cost) { return 0.25f * static_cast<float>(cost / 32); }
};

// Until all units are done, in key tiles. least: of the costs of a split.
template <class Least>
FI_HOST_DEVICE float prefill_time(const PrefillTileStats& tiles, const PrefillSplit& split, int32_t kv_heads,
                                  const Least& least) {
  const float longest = static_cast<float>(tiles.longest), blocks = static_cast<float>(split.blocks);
  const float mean = static_cast<float>(tiles.work) / static_cast<float>(tiles.num_tiles ? tiles.num_tiles : 1);
  if (split.slots > 0 && tiles.longest >= kMinSplitTiles)
    return mean * static_cast<float>(split.first) / blocks + PrefillSplit::time(least(split));
  if (split.first + split.units <= split.blocks) return longest;
  // Half a unit is where blocks end, on average.
  const float uneven = static_cast<float>(tiles.work) * static_cast<float>(kv_heads) / blocks + mean / 2;
  return uneven > longest ? uneven : longest;
}

// Whether tiles of two thirds of the rows are done sooner. For a key tile they take 0.78 of the time (H200, one
// sequence of 128 queries and 32768 keys, a unit a block: 1.88 us, against 2.4 in rounds of tall ones).
template <class Least>
FI_HOST_DEVICE bool prefers_short(const PrefillTileStats& tall, const PrefillTileStats& low, int32_t kv_heads,
                                  int32_t blocks, int32_t slots, const Least& least) {
  const auto time = [&](const PrefillTileStats& tiles) {
    return prefill_time(tiles, PrefillSplit::of(tiles, kv_heads, blocks, slots), kv_heads, least);
  };
  return 0.78f * time(low) < time(tall);
}

}  // namespace fi
