// Parameters of replayssm_materialize, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/linear_attention/checkpointing_ssu.h"

namespace fi {

// For each layer and each active request: the state of slot `from`, replayed by `length` tokens of its ring from row
// `start` on, goes to slot `to`. Addresses come from tables; what lies in a slot has no gaps.
struct ReplayssmMaterializeParams {
  const int64_t *states, *x_rings, *b_rings, *dt_rings, *a;                          // [layers]: addresses
  const int64_t *state_strides, *x_ring_strides, *b_ring_strides, *dt_ring_strides;  // [layers]: of a slot
  const int32_t *from, *to;                                                          // [layers, batch]
  const int32_t *start, *length;                                                     // [batch]
  const int32_t* active;                                                             // [batch]: requests, then -1
  int64_t from_stride, to_stride, pad_slot;
  NumberType a_type;
  int32_t layers, batch, dim, dstate, ring;
  int32_t rows_per_cta;
  Divisor tiles, heads, group, requests;

  FI_HOST_DEVICE int32_t ring_row(int32_t start_row, int32_t i) const { return (start_row + i) % ring; }
};

}  // namespace fi
