// Parameters of selective_state_update, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/linear_attention/tables.h"

namespace fi {

// For each token of a row and each head h, with the state S [dim, dstate]:
//   S = exp(dt A[h]) S + dt x B^T;  out = S C + D[h] x;  out *= silu(z)
// where dt is (softplus of) dt + dt_bias[h]. Strides are in elements.
struct SelectiveStateUpdateParams {
  void* out;               // [batch, tokens, heads, dim], or [total_tokens, heads, dim] with cu_seqlens; so are x and z
  void* state;             // [slots, heads, dim, dstate]
  void* intermediate;      // [rows, steps, heads, dim, dstate] or null, the state after each token
  const void *x, *z;       // z may be null
  const void *b, *c;       // [.., groups, dstate]
  Numbers dt;              // [batch, tokens, heads]
  Numbers dt_bias, d;      // [heads], may be null
  const float* a;          // [heads]
  const void* cu_seqlens;  // [batch + 1], int32 or int64, or null
  const void* accepted;    // [batch], int32 or int64, or null: the state starts at slots[row, accepted - 1]
  IndexTable slots, to_slots;    // [batch] or [batch, tokens]; a negative slot, or pad_slot, is padding
  IndexTable intermediate_rows;  // [batch]
  int64_t x_strides[3], z_strides[3], out_strides[3], dt_strides[3];  // batch, token, head
  int64_t b_strides[3], c_strides[3];                                 // batch, token, group
  int64_t a_stride, d_stride, dt_bias_stride;
  int64_t state_strides[4], intermediate_strides[5];
  int64_t pad_slot;
  int32_t batch, tokens, dim, dstate;
  int32_t rows_per_cta;         // of dim
  Divisor tiles, heads, group;  // CTAs of a head; heads; heads of a group
  bool softplus, updates_state, vectors;
  bool each_token;  // the state after token t goes to to_slots[row, t]
  bool cu_is_wide, accepted_is_wide;

  // Of a slot from a table.
  FI_HOST_DEVICE bool is_padding(int64_t slot) const { return slots.data && (slot < 0 || slot == pad_slot); }
};

}  // namespace fi
