// Parameters of chunk_gated_delta_rule, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/tables.h"
#include "fi/tensor_map.h"

namespace fi {

constexpr int kChunkTokens = 64;  // tokens
constexpr Divisor kChunkDivisor{kChunkTokens, 1, 6};
constexpr int kChunkMatrix = 2560;  // elements of a lower triangular matrix: 10 blocks of 16 x 16

// States [rows, heads, dim_v, dim_k]; rows are slots of a pool where indices are given. Absent if data is null.
struct ChunkStatesView {
  void* data;
  NumberType type;
  int64_t strides[3];  // row, head, dim_v
};

// For each token of a sequence and each head, with the state S [dim_v, dim_k]:
//   S *= g;  u = beta (v - S k);  S += u k^T;  out = scale S q
// In chunks (arXiv:2412.06464, section 3.3): with G_i the product of g up to token i of a chunk, D_ij = G_i / G_j for
// i >= j and else 0, A = strictly lower(diag(beta) (K K^T o D)) and T = (I + A)^-1 diag(beta):
//   U = T (V - diag(G) K S^T);  O = scale (diag(G) Q S^T + (Q K^T o D) U);  S = G_last S + U^T diag(G_last / G) K
// The chunks of a sequence that begins at token t have numbers from t / 64 + its index on. Strides are in elements.
// With a gate for each channel of k, G_i is a vector: A and the scores are sums over channels c of k_ic k_jc G_ic /
// G_jc, and G scales the rows of K and Q by channels, G_last the columns of S. Few long sequences are cut into
// segments, numbered alike, which are computed in parallel: from a state S before a segment follows S M + N after it,
// where M and N do not depend on S.
struct ChunkGatedDeltaRuleParams {
  TensorMap k_tiles, q_tiles, v_tiles;  // boxes of 64 columns of a head and 64 tokens, if has_tiles; with
                                        // channel_gates of v only
  void* out;                            // [tokens, heads, dim_v]
  const void *q, *k;                    // [tokens, q_heads or k_heads, dim_k]
  const void* v;                        // [tokens, v_heads, dim_v]
  const float* g;                       // [tokens, heads], [tokens, heads, dim_k] with channel_gates, or null (1)
  const float* beta;                    // [tokens, heads] or null (1)
  void* solved;                         // workspace: T of each chunk and head, dtype of q, as LowerTriangle lays it out
  void* scores;                         // workspace: scale (Q K^T o D)
  float* factors;  // workspace: of each chunk and head 4 x 64: of S k, of S q, of U in the update, and G_last; with
                   // channel_gates dim_k: G_last
  float* maps;     // workspace: N [dim_v, dim_k] and M [dim_k, dim_k] of each segment and head, if there are segments
  float* carried;  // workspace: the state [dim_v, dim_k] before each segment and head
  ChunkStatesView initial, output, checkpoints;
  IndexTable offsets;            // [sequences + 1]
  IndexTable slots;              // [sequences]
  IndexTable to_slots;           // [sequences]: of `output`; absent: slots
  IndexTable checkpoint_starts;  // [sequences + 1]
  int64_t q_strides[2], k_strides[2], v_strides[2], out_strides[2], g_strides[2], beta_strides[2];  // token, head
  int32_t sequences, dim_k, dim_v;
  Divisor heads;
  Divisor checkpoint_tokens;          // a multiple of 64, or 0
  Divisor segment_tokens;             // a multiple of 64, or 0: a sequence is one segment
  Divisor units;                      // of heads that share a head of k and of q
  int32_t unit_heads;                 // 1, 2 or 4
  Divisor slices, map_slices;         // CTAs that share the state of a head, and those that share M and N
  Divisor q_group, k_group, v_group;  // heads that share a head of q, of k and of v
  float scale;
  bool l2norm, has_tiles, channel_gates;
  void* decayed;  // workspace with channel_gates: of each chunk and head three tiles, as ChunkTile lays them out, dtype
                  // of q: diag(G) K, scale diag(G) Q, diag(G_last / G) K

  // The slot that takes the last state of a sequence; negative: none.
  FI_HOST_DEVICE int64_t output_slot(int64_t sequence) const {
    return to_slots.data ? to_slots.at(sequence) : slots.or_row(sequence);
  }
};

}  // namespace fi
