// Which tiles of query rows a batch has and in which order blocks take them; shared by device code, launcher and CPU.
#pragma once
#include "fi/attention/mask.h"
#include "fi/types.h"

namespace fi {

struct alignas(16) PrefillRequest {
  int32_t qo_begin, qo_len;  // tokens of q
  int32_t kv_begin, kv_len;  // first entry of the page table, or first token of ragged keys; tokens
};

// tile_tokens query tokens of a request, for every kv head.
struct alignas(8) PrefillItem {
  int32_t request, tile;
};

// Rows of the output that belong to no request, before the first one's and behind the last one's.
struct PrefillRest {
  int32_t rows, batch;  // of the output, and of the schedule; rows 0: what belongs to no request stays as it is
  int32_t first, last;  // of the requests

  FI_HOST_DEVICE static PrefillRest of(int32_t rows, int32_t batch, const PrefillRequest* requests) {
    PrefillRest rest{rows, batch, 0, 0};
    if (rows > 0 && batch > 0) {
      rest.first = requests[0].qo_begin < rows ? requests[0].qo_begin : rows;
      rest.last = requests[batch - 1].qo_begin + requests[batch - 1].qo_len;
    }
    return rest;
  }
  FI_HOST_DEVICE int32_t count() const { return rows == 0 ? 0 : first + (last < rows ? rows - last : 0); }
  FI_HOST_DEVICE int32_t row(int32_t i) const { return i < first ? i : i - first + last; }
};

// What kernels read first. Units of work are items for one kv head each, in the order in which blocks take them. Those
// from number `whole` on have their key tiles cut into `parts` or fewer, of no fewer than `part_keys` tiles but for the
// last, wherever the kernel can merge parts; other kernels take every unit whole.
struct alignas(16) PrefillHeader {
  int32_t items;
  int32_t next, done;   // the next unit to hand out, blocks that are done: both 0 between launches
  int32_t tile_tokens;  // query tokens of a tile
  int32_t whole, parts, part_keys, unused;
};

// A buffer of 32-bit integers: header, counters of parts that are done (0 between launches), requests, then the items
// in the order of their work, longest first.
struct PrefillSchedule {
  static constexpr int32_t kHeader = 8, kSplitUnits = 256, kWarps = 12, kCounters = kSplitUnits * kWarps;
  PrefillHeader* header;
  int32_t* counters;  // [kSplitUnits][kWarps], of the consumer warps of split units
  PrefillRequest* requests;
  PrefillItem* items;

  FI_HOST_DEVICE static int64_t words(int64_t batch, int64_t items) {
    return kHeader + kCounters + 4 * batch + 2 * items;
  }
  FI_HOST_DEVICE static PrefillSchedule at(int32_t* words, int64_t batch) {
    int32_t* requests = words + kHeader + kCounters;
    return {reinterpret_cast<PrefillHeader*>(words), words + kHeader, reinterpret_cast<PrefillRequest*>(requests),
            reinterpret_cast<PrefillItem*>(requests + 4 * batch)};
  }
};

}  // namespace fi
