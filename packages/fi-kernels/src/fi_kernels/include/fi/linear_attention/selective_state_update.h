// Parameters of selective_state_update, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/exact.h"
#include "fi/tables.h"

namespace fi {

// For each token of a row and each head h, with the state S [dim, dstate]:
//   S = exp(dt A[h]) S + dt x B^T;  out = S C + D[h] x;  out *= silu(z)
// where dt is (softplus of) dt + dt_bias[h]. Strides are in elements. With `elements`, dt, dt_bias and d have a number
// for each of dim, and a for each of dim and dstate.
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
  int64_t dt_dim_stride, a_dim_stride, a_column_stride, d_dim_stride, dt_bias_dim_stride;
  float *scale, *intermediate_scale;  // of each row of integers: [slots, heads, dim], [rows, steps, heads, dim]
  int64_t scale_strides[3], intermediate_scale_strides[4];
  const int64_t* seed;  // of stochastic rounding, or null
  int32_t rounds;       // of Philox
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

// Column c of a row gets word c / 32 % 4 of the counter that c % 32 and c / 128 count, for the state after token t.
FI_EXACT Random state_random(const SelectiveStateUpdateParams& p, int64_t row, int t, int column) {
  const uint64_t at = static_cast<uint64_t>(t) << 32 | static_cast<uint32_t>(column % 32 + column / 128 * 32);
  return philox(static_cast<uint64_t>(*p.seed), at, static_cast<uint64_t>(row), p.rounds);
}

// x as a number of fp16: the one next to it away from 0 with the probability of its distance from the one before.
FI_EXACT float round_to_half(float x, uint32_t random) {
  const uint32_t bits = bits_of(x), sign = bits & 0x80000000u, size = bits & 0x7fffffffu;
  if (size >= 0x477fe000u) return x;  // 65504 and above, infinity, NaN
  if (size >= 0x38800000u)            // 2^-14 and above: 13 bits of the mantissa are left out
    return from_bits(sign | ((size & ~0x1fffu) + ((random >> 19) < (size & 0x1fffu) ? 0x2000u : 0u)));
  const float steps = from_bits(size) * 0x1p24f;  // of fp16's subnormal numbers
  const uint32_t whole = static_cast<uint32_t>(steps);
  const bool up = static_cast<float>(random >> 8) * 0x1p-24f < steps - static_cast<float>(whole);
  return from_bits(sign | bits_of(static_cast<float>(whole + up) * 0x1p-24f));
}

}  // namespace fi
