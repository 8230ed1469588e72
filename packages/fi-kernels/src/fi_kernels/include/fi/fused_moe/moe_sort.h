// Parameters of moe_sort, shared by launcher and device code.
#pragma once
#include "fi/types.h"

namespace fi {

// Sorts the slots t * top_k + j by their local expert ids[t, j] - first_expert; slots of one expert keep their order.
struct MoeSortParams {
  int32_t* offsets;    // [experts + 1]: rows offsets[e] .. offsets[e + 1] - 1 belong to expert e
  int32_t* rows;       // [slots]: row -> token; -1 from offsets[experts] on
  int32_t* positions;  // [slots]: slot -> row; -1: the expert is not one of these
  int32_t* active;     // [experts + 1]: the number of experts with rows, their numbers, then -1
  int32_t* zeros;      // [zeros_count]: become 0, for counters of later kernels
  const void* ids;     // [tokens, top_k]
  int64_t ids_token_stride, ids_slot_stride;
  int32_t slots, top_k, experts, zeros_count;
  int32_t warps, warp_slots;  // of a CTA: warps that sort, and slots of each
  int64_t first_expert;
};

constexpr int32_t kMoeSortWarps = 32;

}  // namespace fi
