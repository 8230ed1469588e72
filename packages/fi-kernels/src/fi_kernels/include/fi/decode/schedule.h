// The schedule of batch decode: which block reads which tiles of keys, and who merges; shared by device and CPU code.
//
// Work is cut into items: one request for one unit, where unit = kv_head * row_tiles + row_tile and a row tile is
// kDecodeRows packed query rows (i * group + g) of that kv head. An item has tiles of kDecodeTile keys, counted from
// position 0 of the request. Items are ordered by unit, then by request, so that all kv heads of a request are read at
// about the same time. Range g is [starts[g], starts[g + 1]) of that order. The units, or all of them together, are
// groups, divided alike: a group has `first` ranges, which blocks begin with, and `later` smaller ones, which blocks
// that are done take one after the other, since not all multiprocessors are equally fast. What the ranges are does not
// depend on who takes them, so results do not either.
//
// An item that no boundary cuts is finished by its block. The parts of another leave their softmax state and
// unnormalised output in slots of a workspace, and the part that arrives last merges them in order of position.
#pragma once
#include "fi/types.h"

namespace fi {

constexpr int32_t kDecodeTile = 64;  // keys
constexpr int32_t kDecodeRows = 16;  // packed query rows
constexpr int32_t kDecodeMostRanges = 1023;
// What beginning an item costs, in tiles: reading its queries and page ids, and writing its output. H200, b64 kv8k 8/1:
// 1 86.3 us, 2 86.5, 4 80.9; b64 of varied lengths: 262.4, 261.8, 263.1; b1 kv8k, b1 kv1k, b256 kv512: no difference.
constexpr int32_t kItemCost = 4;

// The schedule is one buffer of 32-bit words: header, starts[ranges + 1], requests[batch], counters[...], one of each
// slot.
struct alignas(16) DecodeHeader {
  int32_t units, batch;
  int32_t chunk;   // tiles of a chunk where parts are chunks (batch-invariant mode); 0: parts are ranges
  int32_t chunks;  // of one unit
  int32_t tiles;   // cost of all units, at most 2^31 - 1
  int32_t groups, first, later;
  int32_t taken;  // of the later ranges; 0 between launches
  int32_t unused[3];

  // The range that a block begins with; -1: none.
  FI_HOST_DEVICE int32_t range_of(int32_t block) const {
    if (later == 0) return block;
    return block < groups * first ? block / first * (first + later) + block % first : -1;
  }
  // The i-th of the others, which are taken group by group, so that all units read the same requests; -1: no more.
  FI_HOST_DEVICE int32_t later_range(int32_t i) const {
    return i < groups * later ? i % groups * (first + later) + first + i / groups : -1;
  }
};

// Where a range begins. Of the item that begins or continues here: kv_len and first_page of its request, and, if it is
// cut by ranges, the range in which it begins and the number of its parts (else 1).
struct alignas(16) DecodeStart {
  int32_t unit, request, tile;
  int32_t leader, parts;
  int32_t kv_len, first_page, unused;
};

struct alignas(16) DecodeRequest {
  int32_t kv_len;
  int32_t first_page;  // index of its first page in page_indices
  int32_t cost;        // sum of the costs of the requests before, in tiles
  int32_t chunks;      // sum of their chunks
};

// The words before the counters, and where each table begins.
constexpr int64_t kDecodeStartsOffset = 12;
FI_HOST_DEVICE int64_t decode_requests_offset(int64_t ranges) { return kDecodeStartsOffset + (ranges + 1) * 8; }
FI_HOST_DEVICE int64_t decode_counters_offset(int64_t ranges, int64_t batch) {
  return decode_requests_offset(ranges) + batch * 4;
}

// The buffer by its parts.
struct DecodeSchedule {
  int32_t* words;
  int32_t ranges, batch;  // ranges: for how many there is room

  FI_HOST_DEVICE DecodeHeader& header() const { return *reinterpret_cast<DecodeHeader*>(words); }
  FI_HOST_DEVICE DecodeStart* starts() const { return reinterpret_cast<DecodeStart*>(words + kDecodeStartsOffset); }
  FI_HOST_DEVICE DecodeRequest* requests() const {
    return reinterpret_cast<DecodeRequest*>(words + decode_requests_offset(ranges));
  }
  FI_HOST_DEVICE int32_t* counters() const { return words + decode_counters_offset(ranges, batch); }
};

// The tiles of a request that its queries see: [first, end). Row 0 of q_len stands at position kv_len - q_len.
struct TileRange {
  int32_t first, end;
};
FI_HOST_DEVICE TileRange decode_tiles(int32_t kv_len, int32_t q_len, int32_t window_left) {
  const int64_t key = static_cast<int64_t>(kv_len) - q_len - window_left;
  const auto first = window_left < 0 || key <= 0 ? 0 : static_cast<int32_t>(key / kDecodeTile);
  const int32_t end = kv_len / kDecodeTile + (kv_len % kDecodeTile != 0);
  return {first < end ? first : end, end};
}

// One part of an item, or a whole one: the tiles that a block takes in one go.
struct DecodeSegment {
  int32_t unit, request, kv_len, first_page;
  int32_t begin, end;  // tiles
  int32_t part, parts;
  int32_t slot, step;  // slots of the item's parts begin here and are so far apart

  FI_HOST_DEVICE bool whole() const { return parts == 1; }
  FI_HOST_DEVICE int32_t slot_of(int32_t i) const { return i ? slot + step * i : slot + step - 1; }
};

// Walks through the segments of ranges: begin() with the first range of a block, or enter() with any, then next() until
// it is false; q_len and window_left are those of the plan.
struct DecodeWalk {
  DecodeHeader header;
  const DecodeStart* starts;
  const DecodeRequest* requests;
  DecodeStart at, end;
  int32_t q_len, window_left, range;

  FI_HOST_DEVICE void begin(const DecodeSchedule& schedule, int32_t block, int32_t queries, int32_t window) {
    header = schedule.header(), starts = schedule.starts(), requests = schedule.requests();
    q_len = queries, window_left = window;
    enter(block);  // is read while the header comes, which seldom says otherwise
    if (header.later > 0) enter(header.range_of(block));
  }
  FI_HOST_DEVICE void enter(int32_t index) {
    range = index;
    if (index < 0)
      end = at;
    else
      at = starts[index], end = starts[index + 1];
  }

  FI_HOST_DEVICE bool done() const {
    if (at.unit != end.unit) return at.unit > end.unit;
    return at.request != end.request ? at.request > end.request : at.tile >= end.tile;
  }
  FI_HOST_DEVICE bool next(DecodeSegment& s) {
    if (done()) return false;
    const bool last = at.unit == end.unit && at.request == end.request;  // the item that the next range continues
    const TileRange tiles = decode_tiles(at.kv_len, q_len, window_left);
    const int32_t limit = last ? end.tile : tiles.end;
    s.unit = at.unit, s.request = at.request, s.kv_len = at.kv_len, s.first_page = at.first_page;
    s.begin = at.tile, s.end = limit;
    if (header.chunk > 0) {
      const int32_t first = tiles.first / header.chunk, chunk = at.tile / header.chunk;
      const int64_t stop = static_cast<int64_t>(chunk + 1) * header.chunk;
      if (stop < s.end) s.end = static_cast<int32_t>(stop);
      s.part = chunk - first;
      s.parts = tiles.end > tiles.first ? (tiles.end - 1) / header.chunk - first + 1 : 1;
      s.slot = at.unit * header.chunks + requests[at.request].chunks;
      s.step = 1;
    } else {
      const bool begins = at.tile == tiles.first;
      const int32_t leader = begins ? range : at.leader;
      s.part = range - leader;
      s.parts = !begins ? at.parts : last ? end.parts : 1;
      s.slot = 2 * leader;
      s.step = 2;
    }
    advance(s.end, tiles.end);
    return true;
  }

 private:
  FI_HOST_DEVICE void advance(int32_t tile, int32_t tiles) {
    at.tile = tile;
    if (tile < tiles) return;
    if (++at.request == header.batch) at.request = 0, ++at.unit;
    if (at.unit >= header.units) return;
    const DecodeRequest r = requests[at.request];
    at.kv_len = r.kv_len, at.first_page = r.first_page;
    at.tile = decode_tiles(r.kv_len, q_len, window_left).first;
  }
};

}  // namespace fi
