// Parameters of mla_plan, and the arithmetic that its device and CPU forms share.
#pragma once
#include "fi/attention/mla/mla_schedule.h"
#include "fi/find_segment.h"

namespace fi {

struct MlaPlanParams {
  int32_t* schedule;         // [kMlaSchedules, schedule_words]
  const int32_t* qo_indptr;  // [batch + 1]; null: qo_len tokens each
  const int32_t* kv_indptr;  // [batch + 1], of page_indices; null: pages_per_request for each
  const void* kv_len;        // [batch], int32 or int64; null: all of their pages
  const int32_t* context;    // [batch], tokens of each request on all ranks; null: kv_len
  int64_t schedule_words, pages_per_request;
  int32_t whole;  // no item is split: results do not depend on the batch
  int32_t kv_len_is_wide, batch, page_size, heads, qo_len, max_ranges;
  int32_t tile_rows[kMlaSchedules], ranges[kMlaSchedules];  // ranges: CTAs or clusters of the kernel
  int32_t slots[kMlaSchedules];                             // partials that the workspace holds, for fixed splits
  int32_t chunk_tiles[kMlaSchedules];                       // KV tiles of a chunk of fixed splits

  FI_HOST_DEVICE MlaSchedule view(int32_t i) const { return {schedule + i * schedule_words, max_ranges, batch}; }
};

// Request b without `cost`. kv_len is at most what the pages hold, so that kernels read no page id of another request.
FI_HOST_DEVICE MlaRequest mla_request(const MlaPlanParams& p, int32_t b, int32_t tile_rows) {
  const int64_t first = p.kv_indptr ? p.kv_indptr[b] : b * p.pages_per_request;
  const int64_t most = (p.kv_indptr ? p.kv_indptr[b + 1] - first : p.pages_per_request) * p.page_size;
  int64_t length = most;
  if (p.kv_len)
    length = p.kv_len_is_wide ? static_cast<const int64_t*>(p.kv_len)[b] : static_cast<const int32_t*>(p.kv_len)[b];
  if (length > most) length = most;
  if (length < 0) length = 0;
  if (length > 0x7fffffc0) length = 0x7fffffc0;
  const int32_t begin = p.qo_indptr ? p.qo_indptr[b] : b * p.qo_len;
  const int32_t tokens = p.qo_indptr ? p.qo_indptr[b + 1] - begin : p.qo_len;
  int64_t rows = tokens > 0 ? static_cast<int64_t>(tokens) * p.heads : 0;
  if (rows > 0x7fffffff) rows = 0x7fffffff;
  return {static_cast<int32_t>(length),
          static_cast<int32_t>(first),
          begin,
          tokens > 0 ? tokens : 0,
          0,
          static_cast<int32_t>((static_cast<uint32_t>(rows) + tile_rows - 1) / tile_rows),
          p.context ? p.context[b] : static_cast<int32_t>(length)};
}
// kChunks: with fixed splits.
template <bool kChunks>
FI_HOST_DEVICE int64_t mla_cost(const MlaRequest& r, int32_t chunk_tiles) {
  if constexpr (kChunks) return static_cast<int64_t>(r.q_tiles) * r.chunks(chunk_tiles);
  return static_cast<int64_t>(r.q_tiles) * r.item_cost();
}

// The work ranges of a schedule: equal cost, or num_splits equal ranges for each item.
// NOTE: few divisions are of 64 bits, and no request is computed twice: the CTA runs 24 KB of code once otherwise.
struct MlaPartition {
  int64_t cost, range_cost;  // range_cost: of a range, without the remainder
  int32_t ranges, num_splits, snap, q_tiles;
  int32_t chunk_tiles, cut_tiles;  // of fixed splits: KV tiles of a chunk, and between which an item may be cut
};
// With fixed splits: ranges of equal numbers of chunks. No item is cut (snap) if the workspace has too few slots, or
// if the longest range is then at most a chunk longer. Whether an item is cut changes no bits.
FI_HOST_DEVICE MlaPartition mla_chunk_partition(const MlaPlanParams& p, int32_t kind, int64_t cost,
                                                const MlaRequest& first, bool uniform) {
  const int32_t max_ranges = p.ranges[kind], slots = p.slots[kind], chunk_tiles = p.chunk_tiles[kind];
  MlaPartition d{cost, cost, 1, 0, 0, first.q_tiles, chunk_tiles, kMlaChunkTiles};
  if (cost == 0) return d;
  const int64_t items = uniform ? static_cast<int64_t>(p.batch) * first.q_tiles : cost;
  const auto longest = [&](int64_t units) { return (units + max_ranges - 1) / max_ranges; };
  const bool is_whole = cost > slots || (uniform && longest(items) * (cost / items) <= longest(cost) + 1);
  const int64_t most = is_whole ? items : cost;
  d.ranges = static_cast<int32_t>(max_ranges < most ? max_ranges : most);
  d.snap = is_whole ? 0x7fffffff : 0;
  const int64_t chunks = kMlaChunkTiles / chunk_tiles;  // of a cut between few states
  if (is_whole || chunks == 1) return d;
  // Cuts between fine chunks balance better, but each chunk then has a state to store and to load, which takes a fifth
  // of its keys' time.
  const int64_t each = longest(cost), few_states = longest((cost + chunks - 1) / chunks) * chunks;
  const bool is_fine = 5 * few_states > 6 * each;
  if (is_fine) d.cut_tiles = chunk_tiles;
  const int64_t most_chunks = is_fine ? each : few_states, wanted = (cost + most_chunks - 1) / most_chunks;
  // No two cuts of an item may be one.
  d.ranges = static_cast<int32_t>(is_fine || cost >= wanted * chunks ? wanted : cost / chunks > 1 ? cost / chunks : 1);
  return d;
}

// uniform: all requests have equal q tiles and lengths, those of `first`.
template <bool kChunks>
FI_HOST_DEVICE MlaPartition mla_partition(const MlaPlanParams& p, int32_t kind, int64_t cost, const MlaRequest& first,
                                          bool uniform) {
  const int32_t max_ranges = p.ranges[kind];
  if constexpr (kChunks) return mla_chunk_partition(p, kind, cost, first, uniform);
  // KV tiles; 4 are slower for short requests (docs/notes/mla-merge.md).
  constexpr int32_t kMinRangeTiles = 2;
  constexpr int32_t kSnapDivisor = 32;  // a boundary this part of a range from the end of an item moves there
  MlaPartition d{cost, cost, 1, 0, 1, first.q_tiles, 0, 1};
  if (cost == 0) return d;
  const int32_t items = p.batch * first.q_tiles, idle = max_ranges / 16, tiles = first.item_cost() - kMlaWorkTileCost;
  if (uniform && items <= max_ranges) {
    const int32_t each = p.whole ? 1 : max_ranges / items, most = p.whole ? 1 : tiles / kMinRangeTiles;
    if (p.whole || each * items >= max_ranges - idle || each > most) {
      int32_t share = (tiles + each - 1) / each;  // no split has more tiles than with `each` splits
      if (share < kMinRangeTiles) share = kMinRangeTiles;
      d.num_splits = p.whole || tiles <= share ? 1 : (tiles + share - 1) / share;
      d.ranges = d.num_splits * items;
      return d;
    }
  }
  const int64_t most = cost / kMinRangeTiles;
  d.ranges = static_cast<int32_t>(max_ranges < most ? max_ranges : most > 1 ? most : 1);
  for (int32_t i = d.ranges; uniform && i >= max_ranges - idle && i > 0; --i)
    if (items % i == 0) {  // whole items leave few CTAs idle
      d.ranges = i;
      break;
    }
  d.range_cost = cost / d.ranges;
  const int64_t snap = d.range_cost / kSnapDivisor;
  d.snap = p.whole ? 0x7fffffff : static_cast<int32_t>(snap > 1 ? snap : 1);
  return d;
}

template <bool kChunks>
FI_HOST_DEVICE int32_t mla_header_cost(const MlaPartition& d) {
  if constexpr (kChunks) return d.cost < 0x7fffffff / d.chunk_tiles ? d.cost * d.chunk_tiles : 0x7fffffff;
  return d.cost < 0x7fffffff ? static_cast<int32_t>(d.cost) : 0x7fffffff;
}

// Boundary g without leader and num_splits. find: the last request that begins at a cost or before.
template <bool kChunks, class Find>
FI_HOST_DEVICE MlaRangeStart mla_start(const MlaPlanParams& p, const MlaPartition& d, int32_t g,
                                       const MlaRequest* requests, Find&& find) {
  MlaRangeStart start{p.batch, 0, 0, g, 1, 0, 0, 0, 0, 0, 0, 0};
  if (g >= d.ranges || d.cost == 0) return start;
  int32_t done;  // KV tiles of the item before the boundary
  MlaRequest r;
  if constexpr (kChunks) {
    const int64_t at = d.cost * g / d.ranges;
    start.request = find(at);
    r = requests[start.request];
    const int32_t chunks = r.chunks(d.chunk_tiles), tiles = r.item_cost() - kMlaWorkTileCost;
    start.q_tile = static_cast<int32_t>((at - r.cost) / chunks);
    const auto number = static_cast<int32_t>((at - r.cost) % chunks);
    done = (number * d.chunk_tiles + (d.cut_tiles - d.chunk_tiles) / 2) / d.cut_tiles * d.cut_tiles;
    if (d.snap > 0) done = 2 * number >= chunks ? tiles : 0;
  } else if (d.num_splits > 0) {
    const int32_t item = g / d.num_splits;
    start.request = item / d.q_tiles, start.q_tile = item % d.q_tiles;
    r = requests[start.request];
    const int32_t tiles = r.item_cost() - kMlaWorkTileCost, split = g % d.num_splits;
    done = tiles / d.num_splits * split + tiles % d.num_splits * split / d.num_splits;
  } else {
    const auto rest_cost = static_cast<int32_t>(d.cost - d.range_cost * d.ranges);
    const int64_t at = d.range_cost * g + rest_cost * g / d.ranges;
    start.request = find(at);
    r = requests[start.request];
    const int64_t offset = at - r.cost;
    if (r.q_tiles > 1) start.q_tile = static_cast<int32_t>(offset / r.item_cost());
    done = static_cast<int32_t>(offset - static_cast<int64_t>(start.q_tile) * r.item_cost()) - kMlaWorkTileCost;
    if (done < 0) done = 0;
    const int32_t rest = r.item_cost() - kMlaWorkTileCost - done;
    if (done <= rest && done < d.snap)
      done = 0;
    else if (rest < d.snap)
      done += rest;
  }
  start.kv_tile = done;
  if (done > 0 && done >= r.item_cost() - kMlaWorkTileCost) {  // the next item
    start.kv_tile = 0;
    if (++start.q_tile >= r.q_tiles) {
      start.q_tile = 0;
      if (++start.request == p.batch) return start;
      r = requests[start.request];
    }
  }
  start.q_tiles = r.q_tiles, start.item_cost = r.item_cost(), start.context = r.context;
  start.kv_len = r.kv_len, start.first_page = r.first_page, start.qo_begin = r.qo_begin, start.qo_len = r.qo_len;
  return start;
}

// A boundary as one number, which increases in the order of work. q tiles of a request are fewer than 2^20.
FI_HOST_DEVICE int64_t mla_key(const MlaRangeStart& s) {
  return (static_cast<int64_t>(s.request) << 44) | (static_cast<int64_t>(s.q_tile) << 24) | s.kv_tile;
}

// Sets leader and num_splits from the keys of all boundaries, count of them.
FI_HOST_DEVICE void mla_link_splits(MlaRangeStart& s, int32_t count, const int64_t* keys) {
  if (s.kv_tile == 0) return;
  const int64_t item = mla_key(s) & ~0xffffffll;
  const auto key = [&](int32_t i) { return keys[i]; };
  // The last boundary at or before the item's beginning is the range in which it begins.
  s.leader = last_not_above(count, item, key);
  s.num_splits = last_not_above(count, item | 0xffffffll, key) - s.leader + 1;
}

}  // namespace fi
