// Parameters of decode_plan, and the arithmetic that its device and CPU forms share.
#pragma once
#include "fi/attention/decode/decode_schedule.h"
#include "fi/find_segment.h"

namespace fi {

struct DecodePlanParams {
  int32_t* schedule;
  const int32_t* indptr;         // [batch + 1], of page_indices; null: pages_per_request for each
  const int32_t* last_page_len;  // [batch]; null where kv_len is given
  const void* kv_len;            // [batch], int32 or int64; null: from indptr and last_page_len
  int64_t pages_per_request;
  int32_t kv_len_is_wide;
  DecodeQueries queries;
  int32_t batch, page_size, q_tiles, num_ctas, num_ranges;
  int32_t split_kv;  // > 0: KV tiles of a chunk; 0: work ranges of about equal cost; < 0: no KV is split
  int32_t counters;  // arrival counters of the schedule

  FI_HOST_DEVICE DecodeSchedule view() const { return {schedule, num_ranges, batch}; }
};

// kv_len and first_page of request b. kv_len is at most what the pages hold, so that kernels read no page id of another
// request.
FI_HOST_DEVICE DecodeRequest decode_request(const DecodePlanParams& p, int32_t b) {
  const int64_t first = p.indptr ? p.indptr[b] : b * p.pages_per_request;
  const int64_t pages = p.indptr ? p.indptr[b + 1] - first : p.pages_per_request, most = pages * p.page_size;
  int64_t length = most - p.page_size;
  if (!p.kv_len)
    length += p.last_page_len[b];
  else if (p.kv_len_is_wide)
    length = static_cast<const int64_t*>(p.kv_len)[b];
  else
    length = static_cast<const int32_t*>(p.kv_len)[b];
  if (length > most) length = most;
  if (length < 0 || pages <= 0) length = 0;
  return {static_cast<int32_t>(length), static_cast<int32_t>(first), 0, 0};
}

struct DecodeCost {
  int32_t tiles, chunks;  // cost of one q tile in KV tiles; its chunks
};
FI_HOST_DEVICE DecodeCost decode_cost(const DecodePlanParams& p, int32_t kv_len) {
  const KvTileRange tiles = decode_kv_tiles(kv_len, p.queries);
  DecodeCost cost{tiles.end - tiles.begin + kWorkTileCost, 1};
  if (p.split_kv > 0 && tiles.end > tiles.begin)
    cost.chunks = (tiles.end - 1) / p.split_kv - tiles.begin / p.split_kv + 1;
  return cost;
}

// The work ranges of a plan. num_splits > 0: each output tile has num_splits ranges of equally many KV tiles.
// num_splits 0: each range group has static_ranges ranges of equal cost, then dynamic_ranges ranges of decreasing cost.
// A boundary less than `snap` KV tiles from the end of an output tile moves to that end.
struct DecodePartition {
  int64_t cost, group_cost, static_cost;  // of all q tiles; of a range group; of its static ranges
  int32_t q_tile_cost, range_groups, static_ranges, dynamic_ranges, snap, num_splits;

  FI_HOST_DEVICE int32_t ranges() const { return range_groups * (static_ranges + dynamic_ranges); }
  // The position of boundary g in the cost of all output tiles, and the snap distance of it.
  FI_HOST_DEVICE int64_t position(int32_t g) const {
    const int32_t group = g / (static_ranges + dynamic_ranges), i = g % (static_ranges + dynamic_ranges);
    const int64_t begin = group_cost * group;
    if (i <= static_ranges) return begin + static_cost * i / static_ranges;
    // Dynamic ranges decrease from 7/4 of their average to 1/4.
    const int64_t x = i - static_ranges, n = dynamic_ranges;
    return begin + static_cost + (group_cost - static_cost) * x * (7 * n - 3 * x) / (4 * n * n);
  }
  FI_HOST_DEVICE int32_t snap_of(int32_t g) const {
    return dynamic_ranges == 0 || g % (static_ranges + dynamic_ranges) < static_ranges ? snap : 1;
  }
};
// uniform: all requests cost the same.
FI_HOST_DEVICE DecodePartition decode_partition(const DecodePlanParams& p, int32_t q_tile_cost, bool uniform) {
  // The constants are the best of docs/notes/decode-plan.md.
  constexpr int32_t kMinRangeTiles = 4;
  constexpr int32_t kMinSplitTilesUniform =
      8;                                // the least KV tiles of a split output tile if all requests cost the same
  constexpr int32_t kSnapDivisor = 32;  // snap is a range's cost over this
  // Dynamic ranges: an eighth of the cost, the last of 16 KV tiles, if that makes two or more per CTA.
  constexpr int32_t kDynamicFraction = 8, kMinDynamicTiles = 16, kMinDynamicPerCta = 2;
  const int64_t cost = static_cast<int64_t>(q_tile_cost) * p.q_tiles;
  DecodePartition d{cost, cost, cost, q_tile_cost, 1, 1, 0, 0, 0};
  if (cost == 0) return d;
  const int32_t idle = p.num_ctas / 16;  // CTAs that may be idle for ranges of equal cost
  const int64_t output_tiles = static_cast<int64_t>(p.q_tiles) * p.batch;
  const int64_t much = static_cast<int64_t>(4 * kDynamicFraction * kMinDynamicTiles * kMinDynamicPerCta) * p.num_ctas;
  const bool dynamic = p.split_kv == 0 && cost >= much && p.num_ranges >= (1 + kMinDynamicPerCta) * p.num_ctas;
  if (uniform && output_tiles <= p.num_ctas && p.split_kv >= 0 && !dynamic) {
    // Ranges of equal cost would make many CTAs begin two work tiles.
    const auto each = static_cast<int32_t>(p.num_ctas / output_tiles);
    const int32_t tiles = q_tile_cost / p.batch - kWorkTileCost, most = tiles / kMinRangeTiles;
    const int64_t longest = (tiles + each - 1) / each;
    if (each * output_tiles >= p.num_ctas - idle || longest * p.num_ctas <= (tiles + kWorkTileCost) * output_tiles) {
      d.num_splits = tiles <= kMinSplitTilesUniform || most < 1 ? 1 : each < most ? each : most;
      d.range_groups = p.q_tiles, d.static_ranges = d.num_splits * p.batch;
      return d;
    }
  }
  // All q tiles have the same ranges if few CTAs are then idle.
  int32_t each = p.num_ctas / p.q_tiles;
  if (each * p.q_tiles >= p.num_ctas - idle) {
    d.range_groups = p.q_tiles, d.group_cost = d.static_cost = q_tile_cost;
    // Equal requests are not split if few CTAs are idle with ranges of whole requests.
    for (int32_t i = each; uniform && i * p.q_tiles >= p.num_ctas - idle; --i)
      if (p.batch % i == 0) {
        each = i;
        break;
      }
  } else {
    each = p.num_ctas;
  }
  const int64_t most = d.group_cost / kMinRangeTiles;
  d.static_ranges = static_cast<int32_t>(each < most ? each : most > 1 ? most : 1);
  if (dynamic) {
    const int64_t rest = d.group_cost / kDynamicFraction, finest = rest / (4 * kMinDynamicTiles);
    const int64_t room = p.num_ranges / d.range_groups - d.static_ranges;
    d.dynamic_ranges = static_cast<int32_t>(room < finest ? room : finest);
    d.static_cost = d.group_cost - rest;
  }
  const int64_t snap = d.static_cost / d.static_ranges / kSnapDivisor;
  d.snap = p.split_kv < 0 ? 0x7fffffff : static_cast<int32_t>(snap > 1 ? snap : 1);
  return d;
}

// Boundary g without leader and num_splits.
FI_HOST_DEVICE DecodeRangeStart decode_start(const DecodePlanParams& p, const DecodePartition& d, int32_t g,
                                             const DecodeRequest* requests) {
  DecodeRangeStart start{p.q_tiles, 0, 0, g, 1, 0, 0, 0};
  if (g >= d.ranges() || d.cost == 0) return start;
  DecodeRequest r;
  KvTileRange tiles;
  int32_t done;  // tiles of the output tile before the boundary
  if (d.num_splits > 0) {
    const int32_t output_tile = g / d.num_splits;
    start.q_tile = output_tile / p.batch, start.request = output_tile % p.batch;
    r = requests[start.request];
    tiles = decode_kv_tiles(r.kv_len, p.queries);
    done = static_cast<int32_t>(static_cast<int64_t>(tiles.end - tiles.begin) * (g % d.num_splits) / d.num_splits);
  } else {
    const int64_t at = d.position(g);
    const int32_t snap = d.snap_of(g);
    start.q_tile = static_cast<int32_t>(at / d.q_tile_cost);
    const auto offset = static_cast<int32_t>(at - static_cast<int64_t>(start.q_tile) * d.q_tile_cost);
    start.request = last_not_above(p.batch, offset, [&](int32_t b) { return requests[b].cost; });
    r = requests[start.request];
    tiles = decode_kv_tiles(r.kv_len, p.queries);
    done = offset - r.cost - kWorkTileCost;
    if (done < 0) done = 0;
    const int32_t rest = tiles.end - tiles.begin - done;
    if (done <= rest && done < snap)
      done = 0;
    else if (rest < snap)
      done = tiles.end - tiles.begin;
  }
  start.kv_tile = tiles.begin + done;
  if (p.split_kv > 0 && done > 0) {  // rounded to the nearest chunk boundary
    start.kv_tile = (start.kv_tile + p.split_kv / 2) / p.split_kv * p.split_kv;
    if (start.kv_tile < tiles.begin) start.kv_tile = tiles.begin;
  }
  if (start.kv_tile >= tiles.end && tiles.end > tiles.begin) {  // the next output tile
    start.kv_tile = 0;
    if (++start.request == p.batch) start.request = 0, ++start.q_tile;
    if (start.q_tile == p.q_tiles) return start;
    r = requests[start.request];
    start.kv_tile = decode_kv_tiles(r.kv_len, p.queries).begin;
  }
  start.kv_len = r.kv_len, start.first_page = r.first_page;
  return start;
}

// A boundary as one number, which increases in the order of work.
FI_HOST_DEVICE int64_t decode_key(const DecodePlanParams& p, const DecodeRangeStart& s) {
  return ((static_cast<int64_t>(s.q_tile) * p.batch + s.request) << 32) | static_cast<uint32_t>(s.kv_tile);
}

// Sets leader and num_splits from the keys of all boundaries.
FI_HOST_DEVICE void decode_link_splits(const DecodePlanParams& p, DecodeRangeStart& s, const int64_t* keys) {
  const KvTileRange tiles = decode_kv_tiles(s.kv_len, p.queries);
  if (s.q_tile >= p.q_tiles || s.kv_tile <= tiles.begin) return;
  const int64_t output_tile = decode_key(p, s) >> 32;
  const auto key = [&](int32_t i) { return keys[i]; };
  s.leader = last_not_above(p.num_ranges + 1, output_tile << 32 | static_cast<uint32_t>(tiles.begin), key);
  s.num_splits = last_not_above(p.num_ranges + 1, (output_tile << 32) + 0xffffffffll, key) - s.leader + 1;
}

// KV tiles of a chunk; 0 if the buffer has too few counters for all chunks.
FI_HOST_DEVICE int32_t decode_chunk_tiles(const DecodePlanParams& p, int32_t chunks) {
  return p.split_kv > 0 && static_cast<int64_t>(chunks) * p.q_tiles <= p.counters ? p.split_kv : 0;
}

FI_HOST_DEVICE DecodeHeader decode_header(const DecodePlanParams& p, const DecodePartition& d, int32_t chunks) {
  return {p.q_tiles,
          p.batch,
          decode_chunk_tiles(p, chunks),
          chunks,
          d.cost < 0x7fffffff ? static_cast<int32_t>(d.cost) : 0x7fffffff,
          d.range_groups,
          d.static_ranges,
          d.dynamic_ranges,
          0,
          {}};
}

}  // namespace fi
