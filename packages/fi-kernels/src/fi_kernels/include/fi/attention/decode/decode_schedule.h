// The split-KV schedule of batch decode: which CTA reads which KV tiles, and which merges; shared by device and CPU
// code.
//
// A q tile is kDecodeQTile packed query rows (i * group_size + g) of a kv head; q_tile = kv_head * q_tiles_per_head +
// its number in the head. Where it has all rows of several kv heads, these count as one head with a larger group. The
// KV of a request has tiles of kDecodeKvTile tokens, counted from position 0. A request and a q tile give one output
// tile. Output tiles are ordered by q tile, then by request, so that CTAs read all kv heads of a request at about the
// same time. Work range g is [starts[g], starts[g + 1]) of that order. Each q tile, or all q tiles together, form a
// range group; all groups have equal boundaries. CTAs begin with the static ranges of a group. A CTA that is done takes
// smaller dynamic ranges from a counter, since SMs are not equally fast. A range does not depend on the CTA that takes
// it, and neither do results.
//
// A work tile is the part of an output tile in one range: one of num_splits splits of its KV. The CTA of an output tile
// with one split writes the output. Otherwise each split stores its softmax state and unnormalised output as a partial
// in the workspace, and the last CTA to arrive merges the partials in order of position.
#pragma once
#include "fi/types.h"

namespace fi {

constexpr int32_t kDecodeKvTile = 64;  // keys
constexpr int32_t kDecodeQTile = 16;   // packed query rows
constexpr int32_t kDecodeMaxRanges = 1023;
// The cost of beginning a work tile, in KV tiles: it reads queries and page ids and writes output. 4 is
// best for few kv heads, and makes no difference elsewhere (docs/notes/decode-plan.md).
constexpr int32_t kWorkTileCost = 4;

// The schedule is one buffer of 32-bit words: header, starts[num_ranges + 1], requests[batch], counters[max_partials].
struct alignas(16) DecodeHeader {
  int32_t q_tiles, batch;
  int32_t chunk_tiles;  // KV tiles of a chunk in batch-invariant mode, where splits are chunks; 0: splits end at range
                        // boundaries
  int32_t chunks;       // of one q_tile
  int32_t cost;         // cost of all q_tiles, at most 2^31 - 1
  int32_t range_groups, static_ranges, dynamic_ranges;
  int32_t next_dynamic;  // the next dynamic range; 0 between launches
  int32_t unused[3];

  // The static range of a CTA; -1: none.
  FI_HOST_DEVICE int32_t range_of(int32_t cta) const {
    if (dynamic_ranges == 0) return cta;
    return cta < range_groups * static_ranges
               ? cta / static_ranges * (static_ranges + dynamic_ranges) + cta % static_ranges
               : -1;
  }
  // Dynamic range number i. CTAs take one of each group after the other, so that all q tiles read the same requests;
  // -1: none.
  FI_HOST_DEVICE int32_t dynamic_range(int32_t i) const {
    return i < range_groups * dynamic_ranges
               ? i % range_groups * (static_ranges + dynamic_ranges) + static_ranges + i / range_groups
               : -1;
  }
};

// The beginning of a work range. Of its first output tile: kv_len and first_page of the request, the range in which the
// output tile begins (leader), and its number of splits.
struct alignas(16) DecodeRangeStart {
  int32_t q_tile, request, kv_tile;
  int32_t leader, num_splits;
  int32_t kv_len, first_page, unused;
};

struct alignas(16) DecodeRequest {
  int32_t kv_len;
  int32_t first_page;  // index of its first page in page_indices
  int32_t cost;        // sum of the costs of the requests before, in tiles
  int32_t chunks;      // sum of their chunks
};

// The number of words before the counters, and the offset of each table.
constexpr int64_t kDecodeStartsOffset = 12;
FI_HOST_DEVICE int64_t decode_requests_offset(int64_t num_ranges) { return kDecodeStartsOffset + (num_ranges + 1) * 8; }
FI_HOST_DEVICE int64_t decode_counters_offset(int64_t num_ranges, int64_t batch) {
  return decode_requests_offset(num_ranges) + batch * 4;
}

// Views of the buffer.
struct DecodeSchedule {
  int32_t* words;
  int32_t num_ranges, batch;  // num_ranges: the capacity of starts, less 1

  FI_HOST_DEVICE DecodeHeader& header() const { return *reinterpret_cast<DecodeHeader*>(words); }
  FI_HOST_DEVICE DecodeRangeStart* starts() const {
    return reinterpret_cast<DecodeRangeStart*>(words + kDecodeStartsOffset);
  }
  FI_HOST_DEVICE DecodeRequest* requests() const {
    return reinterpret_cast<DecodeRequest*>(words + decode_requests_offset(num_ranges));
  }
  FI_HOST_DEVICE int32_t* counters() const { return words + decode_counters_offset(num_ranges, batch); }
};

// The query tokens of a request, its last ones, and the keys before its own that each attends to; negative: all.
struct DecodeQueries {
  int32_t q_len, window_left;
};

// The KV tiles that the queries of a request attend to: [begin, end). Query token 0 is at position kv_len - q_len.
struct KvTileRange {
  int32_t begin, end;
};
FI_HOST_DEVICE KvTileRange decode_kv_tiles(int32_t kv_len, DecodeQueries queries) {
  const int64_t key = static_cast<int64_t>(kv_len) - queries.q_len - queries.window_left;
  const auto first = queries.window_left < 0 || key <= 0 ? 0 : static_cast<int32_t>(key / kDecodeKvTile);
  const int32_t end = kv_len / kDecodeKvTile + (kv_len % kDecodeKvTile != 0);
  return {first < end ? first : end, end};
}

// The KV tiles [begin, end) of one request that a CTA processes for one q tile.
struct DecodeWorkTile {
  int32_t q_tile, request, kv_len, first_page;
  int32_t begin, end;  // tiles
  int32_t split_idx, num_splits;
  int32_t first_partial,
      partial_stride;  // index of the partial of split 1 less the stride, and the stride (see partial_of)

  FI_HOST_DEVICE bool is_whole() const { return num_splits == 1; }
  FI_HOST_DEVICE bool has_chunks() const { return partial_stride == 1; }  // splits are chunks
  FI_HOST_DEVICE int32_t partial_of(int32_t i) const {
    return i ? first_partial + partial_stride * i : first_partial + partial_stride - 1;
  }
};

// Gives the work tiles of work ranges: begin() enters the static range of a CTA, enter() any range; next() is false at
// its end. queries: those of the plan.
struct DecodeTileScheduler {
  DecodeHeader header;
  const DecodeRangeStart* starts;
  const DecodeRequest* requests;
  DecodeRangeStart at, end;
  DecodeQueries queries;
  int32_t range;

  FI_HOST_DEVICE void begin(const DecodeSchedule& schedule, int32_t cta, DecodeQueries planned) {
    header = schedule.header(), starts = schedule.starts(), requests = schedule.requests();
    queries = planned;
    enter(cta);  // loads before the header has arrived, which confirms the range in most plans
    if (header.dynamic_ranges > 0) enter(header.range_of(cta));
  }
  FI_HOST_DEVICE void enter(int32_t index) {
    range = index;
    if (index < 0)
      end = at;
    else
      at = starts[index], end = starts[index + 1];
  }

  FI_HOST_DEVICE bool done() const {
    if (at.q_tile != end.q_tile) return at.q_tile > end.q_tile;
    return at.request != end.request ? at.request > end.request : at.kv_tile >= end.kv_tile;
  }
  FI_HOST_DEVICE bool next(DecodeWorkTile& s) {
    if (done()) return false;
    const bool last =
        at.q_tile == end.q_tile && at.request == end.request;  // the output tile that the next range continues
    const KvTileRange tiles = decode_kv_tiles(at.kv_len, queries);
    const int32_t limit = last ? end.kv_tile : tiles.end;
    s.q_tile = at.q_tile, s.request = at.request, s.kv_len = at.kv_len, s.first_page = at.first_page;
    s.begin = at.kv_tile, s.end = limit;
    if (header.chunk_tiles > 0) {
      const int32_t first = tiles.begin / header.chunk_tiles, chunk = at.kv_tile / header.chunk_tiles;
      const int64_t stop = static_cast<int64_t>(chunk + 1) * header.chunk_tiles;
      if (stop < s.end) s.end = static_cast<int32_t>(stop);
      s.split_idx = chunk - first;
      s.num_splits = tiles.end > tiles.begin ? (tiles.end - 1) / header.chunk_tiles - first + 1 : 1;
      s.first_partial = at.q_tile * header.chunks + requests[at.request].chunks;
      s.partial_stride = 1;
    } else {
      const bool begins = at.kv_tile == tiles.begin;
      const int32_t leader = begins ? range : at.leader;
      s.split_idx = range - leader;
      s.num_splits = !begins ? at.num_splits : last ? end.num_splits : 1;
      s.first_partial = 2 * leader;
      s.partial_stride = 2;
    }
    advance(s.end, tiles.end);
    return true;
  }

 private:
  FI_HOST_DEVICE void advance(int32_t tile, int32_t tiles) {
    at.kv_tile = tile;
    if (tile < tiles) return;
    if (++at.request == header.batch) at.request = 0, ++at.q_tile;
    if (at.q_tile >= header.q_tiles) return;
    const DecodeRequest r = requests[at.request];
    at.kv_len = r.kv_len, at.first_page = r.first_page;
    at.kv_tile = decode_kv_tiles(r.kv_len, queries).begin;
  }
};

}  // namespace fi
