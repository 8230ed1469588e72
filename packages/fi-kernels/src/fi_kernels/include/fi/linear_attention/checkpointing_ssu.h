// Parameters of checkpointing_ssu, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/tables.h"

namespace fi {

constexpr int kRingTokens = 16;  // the most tokens that are replayed, and the most that are new

// A slot holds a state [heads, dim, dstate] and a ring of `ring` rows with the inputs of tokens behind it: x, B and the
// final dt. The state is replayed by the `held` tokens from row `start` of the ring on, then the new tokens follow as
// in selective_state_update, and their inputs are stored behind those held. The state itself, after the held tokens, is
// stored only if held + 2 tokens > ring: the next call would not find room.
struct CheckpointingSsuParams {
  void* out;              // [batch, tokens, heads, dim], or [total_tokens, heads, dim] with cu_seqlens; so are x and z
  void* state;            // [slots, heads, dim, dstate]
  void *x_ring, *b_ring;  // [slots, heads, ring, dim], [slots, groups, ring, dstate]
  float* dt_ring;         // [slots, heads, ring]
  const int32_t *start, *held;  // [slots]
  const void *x, *z;            // z may be null
  const void *b, *c;            // [.., groups, dstate]
  Numbers dt;                   // [batch, tokens, heads]
  Numbers dt_bias, d;           // [heads], may be null
  const float* a;               // [heads]
  const void* cu_seqlens;       // [batch + 1], int32 or int64, or null
  IndexTable slots;             // [batch]; a negative slot, or pad_slot, is padding
  int64_t x_strides[3], z_strides[3], out_strides[3], dt_strides[3];  // batch, token, head
  int64_t b_strides[3], c_strides[3];                                 // batch, token, group
  int64_t state_strides[3];                                           // slot, head, row of dim
  int64_t x_ring_strides[3], b_ring_strides[3], dt_ring_strides[3];   // slot, head or group, row of the ring
  int64_t a_stride, d_stride, dt_bias_stride, pad_slot;
  int32_t batch, tokens, dim, dstate, ring;
  int32_t rows_per_cta;         // of dim
  Divisor tiles, heads, group;  // CTAs of a head; heads; heads of a group
  bool softplus, cu_is_wide;

  FI_HOST_DEVICE bool is_padding(int64_t slot) const { return slots.data && (slot < 0 || slot == pad_slot); }
  FI_HOST_DEVICE int32_t ring_row(int32_t start_row, int32_t i) const { return (start_row + i) % ring; }
  FI_HOST_DEVICE bool stores_state(int32_t held_tokens) const { return held_tokens + 2 * tokens > ring; }
};

}  // namespace fi
