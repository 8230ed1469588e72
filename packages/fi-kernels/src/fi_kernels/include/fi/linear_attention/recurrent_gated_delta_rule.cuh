// recurrent_gated_delta_rule on sm_80 and later: a warp holds rows of the state in registers over all tokens, so the
// state is read and written once. Warps are independent: no shared memory, no barriers.
#pragma once
#include "fi/linear_attention/recurrent_gated_delta_rule.h"
#include "fi/linear_attention/state_tile.cuh"

namespace fi {

// What all rows of a head share for one token: key and query at the columns of a lane, and the gates.
// kVectorGate: a gate for each channel of k.
template <class T, class Tile, bool kVectorGate>
struct GatedToken {
  float key[Tile::kColumns], query[Tile::kColumns];  // key: scaled
  float alpha[kVectorGate ? Tile::kColumns : 1];
  float beta, query_scale, key_query;

  // Reads what does not depend on the state.
  FI_DEVICE void load(const RecurrentGatedDeltaRuleParams& p, int64_t b, int h, int t) {
    const T* q = static_cast<const T*>(p.q) + b * p.q_strides[0] + t * p.q_strides[1] +
                 static_cast<int64_t>(divide(h, p.q_group)) * p.q_strides[2];
    const T* k = static_cast<const T*>(p.k) + b * p.k_strides[0] + t * p.k_strides[1] +
                 static_cast<int64_t>(divide(h, p.k_group)) * p.k_strides[2];
    Tile::load_columns(k, p.vectors, key);
    Tile::load_columns(q, p.vectors, query);
    beta = number(p.b, b * p.b_strides[0] + t * p.b_strides[1] + h * p.b_strides[2]);
    const int64_t gate = b * p.a_strides[0] + t * p.a_strides[1] + h * p.a_strides[2];
#pragma unroll
    for (int i = 0; i < (kVectorGate ? Tile::kColumns : 1); ++i) {
      const int c = kVectorGate ? Tile::column(i) : 0;
      alpha[i] = number(p.a, gate + c * p.a_strides[3]) +
                 number(p.dt_bias, h * p.dt_bias_strides[0] + c * p.dt_bias_strides[1]);
    }
  }
  FI_DEVICE void finish(const RecurrentGatedDeltaRuleParams& p, float rate) {
    beta = sigmoid(beta);
#pragma unroll
    for (int i = 0; i < (kVectorGate ? Tile::kColumns : 1); ++i) alpha[i] = expf(rate * softplus(alpha[i]));
    float kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
    for (int i = 0; i < Tile::kColumns; ++i) {
      kk += key[i] * key[i];
      qq += query[i] * query[i];
      kq += key[i] * query[i];
    }
    float key_scale = 1.f;
    query_scale = p.scale;
    if (p.l2norm) {
      key_scale = rsqrtf(warp_sum(kk, kStateLanes) + 1e-6f);
      query_scale *= rsqrtf(warp_sum(qq, kStateLanes) + 1e-6f);
    }
    key_query = warp_sum(kq, kStateLanes) * key_scale;
#pragma unroll
    for (int i = 0; i < Tile::kColumns; ++i) key[i] *= key_scale;
  }
};

// T: of q, k, v and out. S: of the state. kRows: of a lane.
template <class T, class S, int kK, int kRows, bool kVectorGate, bool kKLast>
FI_DEVICE void recurrent_gated_delta_rule(const RecurrentGatedDeltaRuleParams& p) {
  using Tile = StateTile<S, kK, kRows, kKLast>;
  const uint32_t head_row = divide(blockIdx.x, p.tiles), b = divide(head_row, p.heads);
  const int h = head_row - b * p.heads.value, tile = blockIdx.x - head_row * p.tiles.value;
  // The CTA goes through its rows in passes; the rows of the next pass are on their way during one.
  const int pass_rows = blockDim.x / 32 * Tile::kWarpRows, end = min(p.dim_v, (tile + 1) * p.rows_per_cta);
  const int begin_row = tile * p.rows_per_cta;
  int row = begin_row + threadIdx.x / 32 * Tile::kWarpRows + Tile::first_row();  // the first of this lane
  T* out = static_cast<T*>(p.out) + b * p.out_strides[0] + h * p.out_strides[2];
  pdl_wait();
  const int64_t slot = p.slots.or_row(b);
  GatedToken<T, Tile, kVectorGate> token;
  token.load(p, b, h, 0);
  const float rate = -expf(p.a_log[h]);
  if (slot < 0) {
    const float zeros[kRows] = {};
    for (int pass = begin_row; pass < end; pass += pass_rows, row += pass_rows)
      for (int t = 0; t < p.tokens; ++t) Tile::store_rows(out + t * p.out_strides[1] + row, zeros, end - row);
    pdl_launch_dependents();
    return;
  }
  S* states = static_cast<S*>(p.state) + h * p.state_strides[1];
  const S* from = states + slot * p.state_strides[0];
  const T* v =
      static_cast<const T*>(p.v) + b * p.v_strides[0] + static_cast<int64_t>(divide(h, p.v_group)) * p.v_strides[2];
  const auto load_values = [&](float (&value)[kRows], int t, int first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) value[r] = first + r < end ? to_float(v[t * p.v_strides[1] + first + r]) : 0.f;
  };
  const auto move_to = [&](const Tile& state, S* to, int64_t row_stride, int64_t column_stride) {
    state.store(to + row * row_stride, row_stride, column_stride, end - row);
  };
  const int64_t to = !p.updates_state ? -1 : p.to_slots.data ? p.to_slots.at(b) : slot;

  typename Tile::Words next;
  float next_value[kRows];
  next.load(from + row * p.state_strides[2], p.state_strides[2], p.state_strides[3], end - row);
  load_values(next_value, 0, row);
  token.finish(p, rate);
  int loaded = 0;
  for (int pass = begin_row; pass < end; pass += pass_rows, row += pass_rows) {  // the same for all lanes of a warp
    Tile state(next);
    float value[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) value[r] = next_value[r];
    if (pass + pass_rows < end) {
      const int after = row + pass_rows;
      next.load(from + after * p.state_strides[2], p.state_strides[2], p.state_strides[3], end - after);
      load_values(next_value, 0, after);
    }
    for (int t = 0; t < p.tokens; ++t) {
      if (t != loaded) {
        token.load(p, b, h, t);
        token.finish(p, rate);
        loaded = t;
      }
      if (t > 0) load_values(value, t, row);
      if constexpr (kVectorGate) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int i = 0; i < Tile::kColumns; ++i) state.x[r][i] *= token.alpha[i];
      }
      // With S' = alpha S + u k^T: S' q = alpha S q + u (k q), so one pass over S serves both products.
      const float alpha = kVectorGate ? 1.f : token.alpha[0];
      float read[kRows], result[kRows];
      state.multiply(token.key, read);
      state.multiply(token.query, result);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float u = token.beta * (value[r] - alpha * read[r]);
        result[r] = token.query_scale * (alpha * result[r] + u * token.key_query);
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) state.x[r][i] = alpha * state.x[r][i] + u * token.key[i];
      }
      Tile::store_rows(out + t * p.out_strides[1] + row, result, end - row);
      if (p.intermediate) {
        S* kept = static_cast<S*>(p.intermediate) + b * p.intermediate_strides[0] + t * p.intermediate_strides[1] +
                  h * p.intermediate_strides[2];
        move_to(state, kept, p.intermediate_strides[3], p.intermediate_strides[4]);
      }
      if (p.token_slots.data) {
        const int64_t own = p.token_slots.at(b, t);
        if (own >= 0) move_to(state, states + own * p.state_strides[0], p.state_strides[2], p.state_strides[3]);
      }
    }
    if (to >= 0) move_to(state, states + to * p.state_strides[0], p.state_strides[2], p.state_strides[3]);
  }
  pdl_launch_dependents();
}

}  // namespace fi
