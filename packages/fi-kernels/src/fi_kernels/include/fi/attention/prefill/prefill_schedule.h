// The schedule of batch prefill: work tiles in the order in which persistent CTAs take them; shared by device and host.
#pragma once
#include "fi/attention/mask.h"
#include "fi/types.h"

namespace fi {

struct alignas(16) PrefillRequest {
  int32_t qo_begin, qo_len;  // tokens of q
  int32_t kv_begin, kv_len;  // first entry of the page table, or first token of ragged keys; tokens
};

// A q tile: tile_tokens query tokens of a request, for every kv head.
struct alignas(8) PrefillWorkTile {
  int32_t request, q_tile;
};

// Output rows outside of all requests: padding before the first request and behind the last.
struct PaddingRows {
  int32_t rows, batch;  // of the output, and of the schedule; rows 0: the padding is not written
  int32_t first, last;  // of the requests

  FI_HOST_DEVICE static PaddingRows of(int32_t rows, int32_t batch, const PrefillRequest* requests) {
    PaddingRows rest{rows, batch, 0, 0};
    if (rows > 0 && batch > 0) {
      rest.first = requests[0].qo_begin < rows ? requests[0].qo_begin : rows;
      rest.last = requests[batch - 1].qo_begin + requests[batch - 1].qo_len;
    }
    return rest;
  }
  FI_HOST_DEVICE int32_t count() const { return rows == 0 ? 0 : first + (last < rows ? rows - last : 0); }
  FI_HOST_DEVICE int32_t row(int32_t i) const { return i < first ? i : i - first + last; }
};

// A work tile is one q tile of one kv head. For kernels that merge partials, the KV of work tiles from number
// first_split on is split: into at most max_splits splits, each of min_split_tiles KV tiles or more, except the last.
struct alignas(16) PrefillHeader {
  int32_t num_tiles;
  int32_t next_work, ctas_done;  // the work tile that a CTA takes next; CTAs that are done: both 0 between launches
  int32_t tile_tokens;           // query tokens of a tile
  int32_t first_split, max_splits, min_split_tiles, unused;
};

// A buffer of 32-bit integers: header, counters of finished splits (0 between launches), requests, then the q tiles,
// longest KV first.
struct PrefillSchedule {
  static constexpr int32_t kHeader = 8, kMaxSplitTiles = 256, kWarps = 12, kCounters = kMaxSplitTiles * kWarps;
  PrefillHeader* header;
  int32_t* counters;  // [kMaxSplitTiles][kWarps], of the consumer warps of split tiles
  PrefillRequest* requests;
  PrefillWorkTile* tiles;

  FI_HOST_DEVICE static int64_t words(int64_t batch, int64_t tiles) {
    return kHeader + kCounters + 4 * batch + 2 * tiles;
  }
  FI_HOST_DEVICE static PrefillSchedule at(int32_t* words, int64_t batch) {
    int32_t* requests = words + kHeader + kCounters;
    return {reinterpret_cast<PrefillHeader*>(words), words + kHeader, reinterpret_cast<PrefillRequest*>(requests),
            reinterpret_cast<PrefillWorkTile*>(requests + 4 * batch)};
  }
};

}  // namespace fi
