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
  static constexpr int kGates = kVectorGate ? Tile::kColumns : 1;
  float key[Tile::kColumns], query[Tile::kColumns];  // key: scaled
  float alpha[kGates];
  float beta, query_scale, key_query;

  // What does not depend on the state, as it lies in memory.
  struct Words {
    typename Tile::template Columns<T> key, query;
    uint32_t beta, gate[kGates], bias[kGates];
    float rate;

    FI_DEVICE void load(const RecurrentGatedDeltaRuleParams& p, int64_t b, int h, int t, bool vectors) {
      key.load(static_cast<const T*>(p.k) + b * p.k_strides[0] + t * p.k_strides[1] +
                   static_cast<int64_t>(divide(h, p.k_group)) * p.k_strides[2],
               vectors);
      query.load(static_cast<const T*>(p.q) + b * p.q_strides[0] + t * p.q_strides[1] +
                     static_cast<int64_t>(divide(h, p.q_group)) * p.q_strides[2],
                 vectors);
      beta = load_bits(p.b, b * p.b_strides[0] + t * p.b_strides[1] + h * p.b_strides[2]);
      const int64_t own = b * p.a_strides[0] + t * p.a_strides[1] + h * p.a_strides[2];
#pragma unroll
      for (int i = 0; i < kGates; ++i) {
        const int c = kVectorGate ? Tile::column(i) : 0;
        gate[i] = load_bits(p.a, own + c * p.a_strides[3]);
        bias[i] = load_bits(p.dt_bias, h * p.dt_bias_strides[0] + c * p.dt_bias_strides[1]);
      }
      rate = p.a_log[h];
    }
  };

  FI_DEVICE void compute(const RecurrentGatedDeltaRuleParams& p, const Words& words) {
    words.key.to_float(key);
    words.query.to_float(query);
    beta = sigmoid(number_of(words.beta, p.b.type));
    const float rate = -expf(words.rate);
#pragma unroll
    for (int i = 0; i < kGates; ++i)
      alpha[i] = expf(rate * softplus(number_of(words.gate[i], p.a.type) + number_of(words.bias[i], p.dt_bias.type)));
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
      key_scale = rsqrtf(warp_sum(kk, Tile::kLanes) + 1e-6f);
      query_scale *= rsqrtf(warp_sum(qq, Tile::kLanes) + 1e-6f);
    }
    key_query = warp_sum(kq, Tile::kLanes) * key_scale;
#pragma unroll
    for (int i = 0; i < Tile::kColumns; ++i) key[i] *= key_scale;
  }

  // Updates rows of a state by their values, and gives their outputs.
  // With S' = alpha S + u k^T: S' q = alpha S q + u (k q), so one pass over S serves both products.
  template <class V, int kRows>
  FI_DEVICE void step(Tile& state, const V (&value)[kRows], float (&result)[kRows]) const {
    if constexpr (kVectorGate) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int i = 0; i < Tile::kColumns; ++i) state.x[r][i] *= alpha[i];
    }
    const float decay = kVectorGate ? 1.f : alpha[0];
    float read[kRows];
    state.multiply(key, read);
    state.multiply(query, result);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float u = beta * (to_float(value[r]) - decay * read[r]);
      result[r] = query_scale * (decay * result[r] + u * key_query);
#pragma unroll
      for (int i = 0; i < Tile::kColumns; ++i) state.x[r][i] = decay * state.x[r][i] + u * key[i];
    }
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
  const int64_t slot = load_index(p.slots, b);
  GatedToken<T, Tile, kVectorGate> token;
  typename GatedToken<T, Tile, kVectorGate>::Words words;
  words.load(p, b, h, 0, p.vectors);
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
  typename Tile::Words next;
  float next_value[kRows];
  next.load(from + row * p.state_strides[2], p.state_strides[2], p.state_strides[3], end - row);
  load_values(next_value, 0, row);
  const int64_t other = load_index(p.to_slots, b), to = !p.updates_state ? -1 : p.to_slots.data ? other : slot;
  token.compute(p, words);
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
        words.load(p, b, h, t, p.vectors);
        token.compute(p, words);
        loaded = t;
      }
      if (t > 0) load_values(value, t, row);
      float result[kRows];
      token.step(state, value, result);
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

// The same for one token of each row, whole tiles of states without gaps between rows, and nothing but the last state
// to store: a warp moves one tile. Many states move as fast as a copy of them; with few, a CTA
// waits for the load of a slot, then for one round of other loads.
template <class T, class S, int kK, int kRows, int kLanes>
FI_DEVICE void recurrent_gated_delta_rule_once(const RecurrentGatedDeltaRuleParams& p) {
  using Tile = StateTile<S, kK, kRows, true, kLanes>;
  constexpr int kStep = Tile::kGroups;  // from a row of a lane to its next
  const uint32_t head_row = divide(blockIdx.x, p.tiles), b = divide(head_row, p.heads);
  const int h = head_row - b * p.heads.value, tile = blockIdx.x - head_row * p.tiles.value;
  const int row = tile * p.rows_per_cta + threadIdx.x / 32 * Tile::kWarpRows + Tile::group();
  T* out = static_cast<T*>(p.out) + b * p.out_strides[0] + h * p.out_strides[2] + row;
  const T* v = static_cast<const T*>(p.v) + b * p.v_strides[0] +
               static_cast<int64_t>(divide(h, p.v_group)) * p.v_strides[2] + row;
  S* states = static_cast<S*>(p.state) + h * p.state_strides[1] + row * kK;
  pdl_wait();
  // Without slots the state is on its way first (docs/notes/linear-attention-decode.md).
  typename Tile::Words next = {};
  next.load_if(!p.slots.data, states + b * p.state_strides[0], kStep * kK);
  const int64_t slot = load_index(p.slots, b), other = load_index(p.to_slots, b);
  const bool exists = slot >= 0;
  typename GatedToken<T, Tile, false>::Words words;
  words.load(p, b, h, 0, true);
  T value[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) value[r] = v[r * kStep];
  next.load_if(p.slots.data && exists, states + slot * p.state_strides[0], kStep * kK);
  GatedToken<T, Tile, false> token;
  token.compute(p, words);
  Tile state(next);
  float result[kRows];
  token.step(state, value, result);
  const int64_t to = p.to_slots.data ? other : slot;
  if (p.updates_state && exists && to >= 0) state.store(states + to * p.state_strides[0], kStep * kK, 1, kRows);
#pragma unroll
  for (int r = 0; r < kRows; ++r) result[r] = exists ? result[r] : 0.f;
  Tile::store_rows(out, result, kRows, kStep);
  pdl_launch_dependents();
}

}  // namespace fi
