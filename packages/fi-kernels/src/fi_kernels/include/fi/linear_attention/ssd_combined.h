// Parameters of ssd_combined, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/linear_attention/chunk_gated_delta_rule.h"

namespace fi {

constexpr int kSsdFactors = 4 * kChunkTokens;  // of a chunk and head

// For each token of a sequence and each head, with the state S [dim, dstate]:
//   d = clamp(softplus?(dt + dt_bias));  S = exp(d A) S + d x B^T;  out = S C + D x;  out *= silu(z)
// In chunks (arXiv:2405.21060, section 6), counted from the first token of each sequence: with c_i the sum of d A up to
// token i of a chunk, P_ij = (C_i . B_j) exp(c_i - c_j) d_j for j <= i and else 0:
//   out = P x + diag(exp(c)) C S^T;  S = exp(c_last) S + x^T diag(d exp(c_last - c)) B
// The chunks of a sequence that begins at token t have numbers from t / 64 + its index on. Strides are in elements.
struct SsdCombinedParams {
  TensorMap b_tiles, c_tiles, x_tiles;  // boxes of 64 columns of a head or group and 64 tokens, if has_tiles
  void* out;                            // [tokens, heads, dim]; so are x and z
  const void *x, *z;                    // z may be null
  const void *b, *c;                    // [tokens, groups, dstate]
  Numbers dt;                           // [tokens, heads]
  Numbers dt_bias;                      // [heads], may be null
  Numbers d;                            // [heads, dim], may be null
  const float* a;                       // [heads]
  void* scores;                         // workspace: P of each chunk and head, as LowerTriangle lays it out
  float* factors;  // workspace: of each chunk and head, for 64 tokens each: c in log2, exp(c), d exp(c_last - c), d
  ChunkStatesView initial, final, checkpoints;
  IndexTable offsets;               // [sequences + 1]; absent: each sequence has `tokens`
  IndexTable from_slots, to_slots;  // [sequences]: of `initial` and of `final`; negative: none
  IndexTable checkpoint_tokens;     // [sequences, checkpoints_each]; with checkpoint_last [checkpoints], in order of
                                    // sequences; negative: none
  IndexTable checkpoint_slots;      // as checkpoint_tokens; absent: the slot of checkpoint i is i; negative: none
  IndexTable checkpoint_last;       // [sequences]: the last checkpoint of each
  int64_t x_strides[2], z_strides[2], out_strides[2], dt_strides[2], b_strides[2], c_strides[2];  // token, head
  int64_t a_stride, dt_bias_stride, d_stride, d_dim_stride;
  float dt_low, dt_high;
  int32_t sequences, tokens, dim, dstate;
  int32_t checkpoints_each;
  int32_t unit_heads;            // of a group that a CTA prepares
  Divisor units;                 // of heads
  Divisor heads, group, slices;  // heads; heads of a group; CTAs that share the state of a head
  bool softplus, has_tiles;

  FI_HOST_DEVICE int64_t begin_of(int64_t n) const { return offsets.data ? offsets.at(n) : n * tokens; }
  FI_HOST_DEVICE int64_t length_of(int64_t n) const { return begin_of(n + 1) - begin_of(n); }
  FI_HOST_DEVICE int32_t first_chunk(int64_t n) const { return static_cast<int32_t>(begin_of(n) / kChunkTokens + n); }
  // The checkpoints of sequence n have numbers from begin to before end.
  FI_HOST_DEVICE int32_t checkpoint_begin(int64_t n) const {
    return checkpoint_last.data && n > 0 ? static_cast<int32_t>(checkpoint_last.at(n - 1)) + 1 : 0;
  }
  FI_HOST_DEVICE int32_t checkpoint_end(int64_t n) const {
    return checkpoint_last.data ? static_cast<int32_t>(checkpoint_last.at(n)) + 1 : checkpoints_each;
  }
  FI_HOST_DEVICE int64_t checkpoint_slot(int64_t n, int64_t i) const {
    return checkpoint_slots.data ? checkpoint_slots.at(n, i) : i;
  }
  // How many tokens of sequence n checkpoint i has seen; negative: there is none.
  FI_HOST_DEVICE int64_t checkpoint_of(int64_t n, int64_t i) const {
    const int64_t at = checkpoint_last.data ? checkpoint_tokens.at(i) : checkpoint_tokens.at(n, i);
    return at < 0 || checkpoint_slot(n, i) < 0 ? -1 : offsets.data ? at - offsets.at(n) : at;
  }
};

}  // namespace fi
