// Parameters of qk_rmsnorm_rope, shared by launcher and device code.
#pragma once
#include "fi/rope/rope.h"

namespace fi {

constexpr int kMaxRopePairs = 128;

// Heads of q and k are normalized over the whole row, times weight, and rotated by the place of the token in a grid of
// frames, rows and columns; heads of v are copied. Strides are in elements; the innermost stride is 1.
struct QkRmsnormRopeParams {
  const void* qkv;        // [tokens, heads of q, k and v, head_dim]
  const void* weight[2];  // [heads of q or k, head_dim]; null: no norm
  void* out[3];           // [tokens, heads, head_dim]
  int64_t qkv_row, qkv_head, out_row[3], out_head[3];
  int32_t heads[3], head_dim, rotary_dim, lanes;  // lanes: a power of two of threads that share a head
  Divisor sequence, plane, width;                 // tokens of a sequence, of a frame, and of a row of one
  int32_t first_row_pair, first_column_pair;      // pairs turn by the frame, then by the row, then by the column
  float eps, inv_d[2], scale[3];                  // scale: before a cast to fp8
  float attention_factor;                         // of cosines and sines
  uint64_t phase_step[kMaxRopePairs];             // of a pair, in revolutions of 2^64 a position

  struct Place {
    uint32_t frame, row, column;
  };
  FI_HOST_DEVICE Place place(uint32_t token) const {
    const uint32_t within = token - divide(token, sequence) * sequence.value;
    const uint32_t frame = divide(within, plane), rest = within - frame * plane.value, row = divide(rest, width);
    return {frame, row, rest - row * width.value};
  }
  FI_HOST_DEVICE void angle(const Place& at, int pair, float* cosine, float* sine) const {
    const uint32_t position = pair >= first_column_pair ? at.column : pair >= first_row_pair ? at.row : at.frame;
    cos_sin_of_phase(static_cast<uint32_t>(position * phase_step[pair] >> 32), cosine, sine);
    *cosine *= attention_factor, *sine *= attention_factor;
  }
};

}  // namespace fi
