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

// A buffer of 32-bit integers: header, requests, then the items in the order of their work, longest first.
struct PrefillSchedule {
  static constexpr int32_t kHeader = 8;
  int32_t* header;  // [0] items; [1] the next tile to hand out, [2] blocks that are done: both 0 between launches
  PrefillRequest* requests;
  PrefillItem* items;

  FI_HOST_DEVICE static int64_t words(int64_t batch, int64_t items) { return kHeader + 4 * batch + 2 * items; }
  FI_HOST_DEVICE static PrefillSchedule at(int32_t* words, int64_t batch) {
    return {words, reinterpret_cast<PrefillRequest*>(words + kHeader),
            reinterpret_cast<PrefillItem*>(words + kHeader + 4 * batch)};
  }
};

}  // namespace fi
