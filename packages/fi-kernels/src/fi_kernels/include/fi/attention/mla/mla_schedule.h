// The split-KV schedule of batch MLA, shared by device and CPU code.
//
// All heads share one latent KV head, so the packed query rows of a request are token * heads + head. One request times
// one q tile of tile_rows packed rows is an item; its KV has tiles of kMlaKvTile tokens. Items are ordered by request,
// then by q tile. Work range g is [starts[g], starts[g + 1]) of that order, for one CTA or one cluster. A work tile is
// the part of an item that lies in one range: one of num_splits splits of its KV. An item with one split writes the
// output; otherwise each split stores a partial, and their CTAs add the partials in order of position.
//
// With fixed splits an item is computed in chunks of kMlaChunkTiles KV tiles from position 0, whose states are folded
// in the order of positions (mla_fold): the bits of a row do not depend on the ranges, which have whole chunks. The
// range in which an item begins folds its chunks as it computes them; ranges that continue the item store each chunk,
// and the item's CTAs fold them behind its own at the end.
//
// The kernel for narrow q tiles of few heads has room for the states of two chunks in registers. Its chunks have
// kMlaFineTiles KV tiles, and those of kMlaChunkTiles are folded to one before: a range stores either one state for
// each fine chunk of a split item, if items are cut between fine chunks, or one for each kMlaChunkTiles.
//
// The number of query tokens is not known on the host, so a plan holds one schedule for each kind of q tile, and a run
// takes the one of its kernel.
#pragma once
#include "fi/types.h"

namespace fi {

constexpr int32_t kMlaKvTile = 64;  // tokens
constexpr int32_t kMlaMaxRanges = 1023;
constexpr int32_t kMlaSchedules = 2;  // narrow q tiles, wide q tiles
// KV tiles of a chunk, which is 0.6 MB of a 16-bit cache; the state of 64 query rows is 0.13 MB.
constexpr int32_t kMlaChunkTiles = 8;
constexpr int32_t kMlaFineTiles = 2;  // of a chunk of the kernel for narrow q tiles
// Cost of beginning a work tile, in KV tiles: it loads queries, fills the pipeline and stores [rows, 512].
constexpr int32_t kMlaWorkTileCost = 4;

// A schedule is a run of 32-bit words: header, starts[max_ranges + 1], arrivals[max_ranges + 1], requests[batch].
struct alignas(16) MlaHeader {
  int32_t ranges;
  int32_t cut_tiles;   // an item is cut at multiples of so many KV tiles
  int32_t max_splits;  // ranges of an item
  int32_t cost;        // of all items in KV tiles, at most 2^31 - 1
};

// The beginning of a work range; of the item there the range in which it begins (leader), and its number of splits; and
// a copy of its request, so that a CTA begins with one load less.
struct alignas(16) MlaRangeStart {
  int32_t request, q_tile, kv_tile, leader;
  int32_t num_splits, q_tiles, item_cost, context;
  int32_t kv_len, first_page, qo_begin, qo_len;
};

struct alignas(16) MlaRequest {
  int32_t kv_len;
  int32_t first_page;        // index of its first page in page_indices
  int32_t qo_begin, qo_len;  // its query tokens
  int64_t cost;              // sum of the costs of the requests before, in KV tiles; with fixed splits in chunks
  int32_t q_tiles;           // its q tiles
  int32_t context;           // its tokens on all ranks of a context that is shared out; else kv_len

  // The cost of a q tile.
  FI_HOST_DEVICE int32_t item_cost() const { return (kv_len + kMlaKvTile - 1) / kMlaKvTile + kMlaWorkTileCost; }
  // The chunks of a q tile. A request without keys has one, which writes zeros.
  FI_HOST_DEVICE int32_t chunks(int32_t chunk_tiles = kMlaChunkTiles) const {
    const int32_t tiles = (kv_len + kMlaKvTile - 1) / kMlaKvTile;
    return tiles > 0 ? (tiles + chunk_tiles - 1) / chunk_tiles : 1;
  }
};

// How the CTAs of a split item meet: the number of splits that have arrived, of the item that begins in a range, modulo
// a multiple of its splits, so that nothing resets it between runs; and of both partials of a range the last run in
// which its CTA left its share of the merge to others.
struct alignas(16) MlaArrivals {
  uint32_t count, left[2];
};

constexpr int64_t kMlaStartsOffset = 4;
FI_HOST_DEVICE int64_t mla_arrivals_offset(int64_t max_ranges) { return kMlaStartsOffset + (max_ranges + 1) * 12; }
FI_HOST_DEVICE int64_t mla_requests_offset(int64_t max_ranges) {
  return mla_arrivals_offset(max_ranges) + (max_ranges + 1) * 4;
}
FI_HOST_DEVICE int64_t mla_schedule_words(int64_t max_ranges, int64_t batch) {
  return mla_requests_offset(max_ranges) + batch * 8;
}

// Views of one schedule.
struct MlaSchedule {
  int32_t* words;
  int32_t max_ranges, batch;

  FI_HOST_DEVICE MlaHeader& header() const { return *reinterpret_cast<MlaHeader*>(words); }
  FI_HOST_DEVICE MlaRangeStart* starts() const { return reinterpret_cast<MlaRangeStart*>(words + kMlaStartsOffset); }
  // CTA c of the cluster of range g has number g * cluster + c; those are at most max_ranges.
  FI_HOST_DEVICE MlaArrivals* arrivals() const {
    return reinterpret_cast<MlaArrivals*>(words + mla_arrivals_offset(max_ranges));
  }
  FI_HOST_DEVICE MlaRequest* requests() const {
    return reinterpret_cast<MlaRequest*>(words + mla_requests_offset(max_ranges));
  }
};

// The slot of split i of an item that begins in range `leader`. A range stores at most two partials: of the item that
// it continues, and of the one that it begins.
FI_HOST_DEVICE int32_t mla_partial(int32_t leader, int32_t i) { return i ? 2 * (leader + i) : 2 * leader + 1; }

// The KV tiles [begin, end) of one item that a CTA processes.
struct MlaWorkTile {
  MlaRequest request;
  int32_t index, q_tile, begin, end;
  int32_t num_splits, split, leader;  // leader: the range in which the item begins
  int32_t ends_range;                 // no work follows

  FI_HOST_DEVICE bool is_whole() const { return num_splits == 1; }  // its CTA writes the output
  FI_HOST_DEVICE bool begins() const { return true; }               // its queries are to be loaded
  FI_HOST_DEVICE bool folds() const { return false; }               // behind the state in its slot
  FI_HOST_DEVICE bool keeps() const { return false; }
  FI_HOST_DEVICE bool merges() const { return !is_whole(); }
  FI_HOST_DEVICE bool has_chunks() const { return false; }  // each fine chunk has a slot
  FI_HOST_DEVICE int32_t first_partial() const { return mla_partial(leader, 0); }
  // Where this split stores its own.
  FI_HOST_DEVICE int32_t partial() const { return mla_partial(leader, split); }
};

// One chunk of an item. num_splits, split and leader are of the ranges that the item lies in.
struct MlaChunk : MlaWorkTile {
  int32_t base;            // the slot of the item's first chunk
  bool is_first, is_last;  // of the item's chunks in this range

  FI_HOST_DEVICE bool is_whole() const { return num_splits == 1 && is_last; }
  FI_HOST_DEVICE bool begins() const { return is_first; }
  FI_HOST_DEVICE bool folds() const { return split == 0 && !is_first; }
  FI_HOST_DEVICE bool keeps() const { return split == 0 && !is_last; }  // for the next chunk of the same CTA
  FI_HOST_DEVICE bool merges() const { return num_splits > 1 && is_last; }
  FI_HOST_DEVICE int32_t first_partial() const { return base; }
  // The range that begins an item has one slot for all its chunks.
  FI_HOST_DEVICE int32_t partial() const { return split == 0 ? base : base + begin / kMlaChunkTiles; }
};

// Gives the work tiles of one range; next() is false at its end.
struct MlaTileScheduler {
  using WorkTile = MlaWorkTile;
  MlaSchedule schedule;
  MlaRangeStart at;
  int32_t end_request, end_q_tile, end_kv_tile, end_num_splits, range;

  FI_HOST_DEVICE void enter(const MlaSchedule& of, int32_t index) {
    schedule = of, range = index;
    at = of.starts()[index];
    const MlaRangeStart& end = of.starts()[index + 1];
    end_request = end.request, end_q_tile = end.q_tile, end_kv_tile = end.kv_tile, end_num_splits = end.num_splits;
  }
  FI_HOST_DEVICE bool next(MlaWorkTile& s) {
    while (at.q_tile >= at.q_tiles && at.request < end_request) advance();  // requests without query tokens
    if (at.request > end_request ||
        (at.request == end_request &&
         (at.q_tile > end_q_tile || (at.q_tile == end_q_tile && at.kv_tile >= end_kv_tile))))
      return false;
    const bool last = at.request == end_request && at.q_tile == end_q_tile;  // the item that the next range continues
    const bool begins = at.kv_tile == 0;
    s.request = {at.kv_len, at.first_page, at.qo_begin, at.qo_len, 0, at.q_tiles, at.context};
    s.index = at.request, s.q_tile = at.q_tile, s.begin = at.kv_tile;
    s.end = last ? end_kv_tile : at.item_cost - kMlaWorkTileCost;
    s.num_splits = !begins ? at.num_splits : last ? end_num_splits : 1;
    s.leader = begins ? range : at.leader, s.split = range - s.leader;
    if (last)
      at.kv_tile = end_kv_tile;
    else if (at.kv_tile = 0, ++at.q_tile >= at.q_tiles)
      advance();
    s.ends_range = last || (at.request == end_request && at.q_tile == end_q_tile && end_kv_tile == 0);
    return true;
  }

 private:
  FI_HOST_DEVICE void advance() {
    ++at.request, at.q_tile = at.kv_tile = at.q_tiles = 0;
    if (at.request > end_request || at.request >= schedule.batch) return;
    const MlaRequest r = schedule.requests()[at.request];
    at.kv_len = r.kv_len, at.first_page = r.first_page, at.qo_begin = r.qo_begin, at.qo_len = r.qo_len;
    at.q_tiles = r.q_tiles, at.item_cost = r.item_cost(), at.context = r.context;
  }
};

// Gives the chunks of one range: the work tiles of MlaTileScheduler, cut at multiples of kMlaChunkTiles.
struct MlaChunkScheduler : MlaTileScheduler {
  using WorkTile = MlaChunk;
  int32_t base;
  bool is_first;

  FI_HOST_DEVICE void enter(const MlaSchedule& of, int32_t index) {
    MlaTileScheduler::enter(of, index);
    is_first = true;
  }
  FI_HOST_DEVICE bool next(MlaChunk& s) {
    if (!MlaTileScheduler::next(s)) return false;
    // Where no item is cut, there may be more chunks than slots, and a range needs one.
    if (is_first && schedule.header().max_splits == 1)
      base = range;
    else if (is_first)
      base = static_cast<int32_t>(schedule.requests()[s.index].cost) + s.q_tile * s.request.chunks();
    s.base = base, s.is_first = is_first;
    s.is_last = is_first = s.end - s.begin <= kMlaChunkTiles;
    if (s.is_last) return true;
    s.end = s.begin + kMlaChunkTiles, s.ends_range = 0;
    const MlaRequest& r = s.request;
    at = {s.index,       s.q_tile,  s.end,    s.leader,     s.num_splits, r.q_tiles,
          r.item_cost(), r.context, r.kv_len, r.first_page, r.qo_begin,   r.qo_len};
    return true;
  }
};

// A work tile of fine chunks.
struct MlaFineWork : MlaWorkTile {
  int32_t base;       // the slot of the item's first chunk
  int32_t cut_tiles;  // of the schedule, if the item is split

  // Each fine chunk has a slot; else every kMlaChunkTiles KV tiles have.
  FI_HOST_DEVICE bool has_chunks() const { return cut_tiles < kMlaChunkTiles; }
  FI_HOST_DEVICE int32_t first_partial() const { return base; }
  // The slot of the chunk that begins at a KV tile.
  FI_HOST_DEVICE int32_t slot(int32_t tile) const { return base + tile / kMlaFineTiles; }
};

// Gives the work tiles of one range whose chunks are fine.
struct MlaFineScheduler : MlaTileScheduler {
  using WorkTile = MlaFineWork;

  FI_HOST_DEVICE bool next(MlaFineWork& s) {
    if (!MlaTileScheduler::next(s)) return false;
    s.base = 0, s.cut_tiles = kMlaChunkTiles;
    if (s.is_whole()) return true;
    s.base = static_cast<int32_t>(schedule.requests()[s.index].cost) + s.q_tile * s.request.chunks(kMlaFineTiles);
    s.cut_tiles = schedule.header().cut_tiles;
    return true;
  }
};

// Of the kernels of a unit.
#if defined(FI_FINE_SPLITS)
constexpr bool kMlaFixedSplits = true, kMlaFineSplits = true;
using MlaScheduler = MlaFineScheduler;
#elif defined(FI_FIXED_SPLITS)
constexpr bool kMlaFixedSplits = true, kMlaFineSplits = false;
using MlaScheduler = MlaChunkScheduler;
#else
constexpr bool kMlaFixedSplits = false, kMlaFineSplits = false;
using MlaScheduler = MlaTileScheduler;
#endif
using MlaWork = MlaScheduler::WorkTile;

}  // namespace fi
