// Parameters of recurrent_gated_delta_rule, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/tables.h"

namespace fi {

// For each token of a row and each value head h, with the state S [dim_v, dim_k]:
//   S *= alpha;  u = beta (v - S k);  S += u k^T;  out = scale S q
// where alpha = exp(-exp(A_log[h]) softplus(a + dt_bias[h])) and beta = sigmoid(b). A gate is one number of a head, or
// (vector gate) one of each of its dim_k channels. Strides are in elements.
struct RecurrentGatedDeltaRuleParams {
  void* out;               // [batch, tokens, v_heads, dim_v]
  void* state;             // [slots, v_heads, dim_v, dim_k]; one of the last two strides is 1
  void* intermediate;      // [batch, tokens, v_heads, dim_v, dim_k] or null, the state after each token
  const void *q, *k;       // [batch, tokens, q_heads or k_heads, dim_k]
  const void* v;           // [batch, tokens, value_heads, dim_v]
  Numbers a;               // [batch, tokens, v_heads] or [.., dim_k]
  Numbers b;               // [batch, tokens, v_heads]
  const float* a_log;      // [v_heads]
  Numbers dt_bias;         // [v_heads] or [v_heads, dim_k]
  IndexTable slots;        // [batch]; a negative slot is padding: out is 0, no state is read or written
  IndexTable to_slots;     // [batch], where the last state goes; negative: nowhere
  IndexTable token_slots;  // [batch, tokens], where the state after each token goes; negative: nowhere
  int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];  // batch, token, head
  int64_t a_strides[4], b_strides[3], dt_bias_strides[2];
  int64_t state_strides[4], intermediate_strides[5];
  int32_t batch, tokens, dim_v, dim_k;
  int32_t rows_per_cta;               // of dim_v
  Divisor tiles, heads;               // CTAs of a head; value heads
  Divisor q_group, k_group, v_group;  // heads of the state that share a head of q, of k and of v
  float scale;
  bool l2norm;         // of q and k: x / sqrt(sum(x^2) + 1e-6)
  bool updates_state;  // whether the last state is written
  bool vectors;        // rows of q and k are aligned to 16 bytes
};

}  // namespace fi
