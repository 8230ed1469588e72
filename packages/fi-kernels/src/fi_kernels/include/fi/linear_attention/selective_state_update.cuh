// selective_state_update on sm_80 and later: a warp holds rows of the state in registers over all tokens, so the state
// is read and written once. Warps are independent: no shared memory, no barriers.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/linear_attention/selective_state_update.h"
#include "fi/linear_attention/state_tile.cuh"

namespace fi {

// T: of x, z, B, C and out. S: of the state. kRows: of a lane.
template <class T, class S, int kK, int kRows>
FI_DEVICE void selective_state_update(const SelectiveStateUpdateParams& p) {
  using Tile = StateTile<S, kK, kRows>;
  const uint32_t head_row = divide(blockIdx.x, p.tiles), b = divide(head_row, p.heads);
  const int h = head_row - b * p.heads.value, tile = blockIdx.x - head_row * p.tiles.value;
  // The CTA goes through its rows in passes; the rows of the next pass are on their way during one.
  const int pass_rows = blockDim.x / 32 * Tile::kWarpRows, end = min(p.dim, (tile + 1) * p.rows_per_cta);
  const int begin_row = tile * p.rows_per_cta;
  int row = begin_row + threadIdx.x / 32 * Tile::kWarpRows + Tile::first_row();  // the first of this lane
  pdl_wait();
  int64_t begin = 0;  // token of the packed ones
  int tokens = p.tokens;
  if (p.cu_seqlens) {
    const IndexTable offsets{p.cu_seqlens, 1, 0, p.cu_is_wide};
    begin = offsets.at(b);
    tokens = static_cast<int>(offsets.at(b + 1) - begin);
  }
  int64_t start = 0;
  if (p.accepted) start = IndexTable{p.accepted, 1, 0, p.accepted_is_wide}.at(b) - 1;
  const int64_t slot = load_index(p.slots, b, start > 0 ? start : 0);
  const int64_t group = divide(h, p.group);
  const auto at_row = [&](const void* base, const int64_t (&strides)[3], int64_t head) {
    return static_cast<const T*>(base) + b * strides[0] + begin * strides[1] + head * strides[2];
  };
  T* out = const_cast<T*>(at_row(p.out, p.out_strides, h));
  const T *x = at_row(p.x, p.x_strides, h), *z = at_row(p.z, p.z_strides, h);
  const T *inputs = at_row(p.b, p.b_strides, group), *outputs = at_row(p.c, p.c_strides, group);
  struct {
    typename Tile::template Columns<T> in, weights;
    uint32_t dt;
  } words;  // of a token
  const auto load_token = [&](int t) {
    words.in.load(inputs + t * p.b_strides[1], p.vectors);
    words.weights.load(outputs + t * p.c_strides[1], p.vectors);
    words.dt = load_bits(p.dt, b * p.dt_strides[0] + (begin + t) * p.dt_strides[1] + h * p.dt_strides[2]);
  };
  const float rate = p.a[h * p.a_stride];
  const uint32_t skip_bits = p.d.data ? load_bits(p.d, h * p.d_stride) : 0;
  const uint32_t bias_bits = p.dt_bias.data ? load_bits(p.dt_bias, h * p.dt_bias_stride) : 0;
  if (tokens > 0) load_token(0);
  if (tokens <= 0 || p.is_padding(slot)) {
    pdl_launch_dependents();
    return;
  }
  S* states = static_cast<S*>(p.state) + h * p.state_strides[1];
  const S* from = states + slot * p.state_strides[0];
  float in[Tile::kColumns], weights[Tile::kColumns], dt, decay;
  const auto compute_token = [&] {
    words.in.to_float(in);
    words.weights.to_float(weights);
    dt = number_of(words.dt, p.dt.type) + number_of(bias_bits, p.dt_bias.type);
    if (p.softplus) dt = softplus(dt);
    decay = expf(dt * rate);
  };
  const auto load_values = [&](float (&value)[kRows], int t, int first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) value[r] = first + r < end ? to_float(x[t * p.x_strides[1] + first + r]) : 0.f;
  };
  const auto move_to = [&](const Tile& state, S* to, int64_t row_stride) {
    state.store(to + row * row_stride, row_stride, 1, end - row);
  };
  typename Tile::Words next;
  float next_value[kRows];
  next.load(from + row * p.state_strides[2], p.state_strides[2], 1, end - row);
  load_values(next_value, 0, row);
  const int64_t other = load_index(p.to_slots, b);
  const int64_t to = !p.updates_state || p.each_token ? -1 : p.to_slots.data ? other : slot;
  compute_token();
  const float skip = number_of(skip_bits, p.d.type);
  int loaded = 0;
  for (int pass = begin_row; pass < end; pass += pass_rows, row += pass_rows) {  // the same for all lanes of a warp
    Tile state(next);
    float value[kRows], result[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) value[r] = next_value[r];
    if (pass + pass_rows < end) {
      const int after = row + pass_rows;
      next.load(from + after * p.state_strides[2], p.state_strides[2], 1, end - after);
      load_values(next_value, 0, after);
    }
    for (int t = 0; t < tokens; ++t) {
      if (t != loaded) load_token(t), compute_token(), loaded = t;
      if (t > 0) load_values(value, t, row);
      float added[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) added[r] = dt * value[r];
      state.update(decay, added, in);
      state.multiply_alike(weights, result);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        result[r] = fmaf(skip, value[r], result[r]);
        if (p.z) {
          const float gate = row + r < end ? to_float(z[t * p.z_strides[1] + row + r]) : 0.f;
          result[r] *= CudaMath::scaled_sigmoid(gate, gate);
        }
      }
      Tile::store_rows(out + t * p.out_strides[1] + row, result, end - row);
      if (p.intermediate) {
        const int64_t kept = p.intermediate_rows.or_row(b);
        const int64_t* strides = p.intermediate_strides;
        if (kept >= 0)
          move_to(state, static_cast<S*>(p.intermediate) + kept * strides[0] + t * strides[1] + h * strides[2],
                  strides[3]);
      }
      if (p.each_token) {
        const int64_t own = p.to_slots.at(b, t);
        if (!p.is_padding(own)) move_to(state, states + own * p.state_strides[0], p.state_strides[2]);
      }
    }
    if (to >= 0 && !(p.to_slots.data && to == p.pad_slot))
      move_to(state, states + to * p.state_strides[0], p.state_strides[2]);
  }
  pdl_launch_dependents();
}

// The same for one token of each row, whole tiles of states without gaps between rows, and nothing but the last state
// to store: a warp moves one tile.
template <class T, class S, int kK, int kRows, int kLanes>
FI_DEVICE void selective_state_update_once(const SelectiveStateUpdateParams& p) {
  using Tile = StateTile<S, kK, kRows, true, kLanes>;
  constexpr int kStep = Tile::kGroups;  // from a row of a lane to its next
  const uint32_t head_row = divide(blockIdx.x, p.tiles), b = divide(head_row, p.heads);
  const int h = head_row - b * p.heads.value, tile = blockIdx.x - head_row * p.tiles.value;
  const int row = tile * p.rows_per_cta + threadIdx.x / 32 * Tile::kWarpRows + Tile::group();
  const int64_t group = divide(h, p.group);
  const auto at_row = [&](const void* base, const int64_t (&strides)[3], int64_t head) {
    return static_cast<const T*>(base) + b * strides[0] + head * strides[2];
  };
  S* states = static_cast<S*>(p.state) + h * p.state_strides[1] + row * kK;
  pdl_wait();
  const int64_t slot = load_index(p.slots, b), other = load_index(p.to_slots, b);
  typename Tile::template Columns<T> in_words, weight_words;
  in_words.load(at_row(p.b, p.b_strides, group), true);
  weight_words.load(at_row(p.c, p.c_strides, group), true);
  const uint32_t dt_bits = load_bits(p.dt, b * p.dt_strides[0] + h * p.dt_strides[2]);
  const uint32_t skip_bits = p.d.data ? load_bits(p.d, h * p.d_stride) : 0;
  const uint32_t bias_bits = p.dt_bias.data ? load_bits(p.dt_bias, h * p.dt_bias_stride) : 0;
  const float rate = p.a[h * p.a_stride];
  const T *x = at_row(p.x, p.x_strides, h) + row, *z = p.z ? at_row(p.z, p.z_strides, h) + row : x;
  T value[kRows], gate[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) value[r] = x[r * kStep], gate[r] = z[r * kStep];
  if (p.is_padding(slot)) return pdl_launch_dependents();
  typename Tile::Words next;
  next.load(states + slot * p.state_strides[0], kStep * kK, 1, kRows);
  float in[Tile::kColumns], weights[Tile::kColumns], result[kRows];
  in_words.to_float(in);
  weight_words.to_float(weights);
  float dt = number_of(dt_bits, p.dt.type) + number_of(bias_bits, p.dt_bias.type);
  if (p.softplus) dt = softplus(dt);
  const float decay = expf(dt * rate), skip = number_of(skip_bits, p.d.type);
  Tile state(next);
  float added[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) added[r] = dt * to_float(value[r]);
  state.update(decay, added, in);
  const int64_t to = p.to_slots.data ? other : slot;
  if (p.updates_state && to >= 0 && !(p.to_slots.data && to == p.pad_slot))
    state.store(states + to * p.state_strides[0], kStep * kK, 1, kRows);
  state.multiply_alike(weights, result);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    result[r] = fmaf(skip, to_float(value[r]), result[r]);
    if (p.z) result[r] *= CudaMath::scaled_sigmoid(to_float(gate[r]), to_float(gate[r]));
  }
  Tile::store_rows(const_cast<T*>(at_row(p.out, p.out_strides, h)) + row, result, kRows, kStep);
  pdl_launch_dependents();
}

// A row of a state of kColumns numbers a lane: floats, or integers with a scale.
template <class S, int kColumns>
FI_DEVICE void store_state_row(const SelectiveStateUpdateParams& p, S* to, float* scale, float (&x)[kColumns],
                               int64_t row, int t) {
  const int lane = threadIdx.x % 32;
  if constexpr (kIsSame<S, int8_t> || kIsSame<S, int16_t>) {
    constexpr float kMost = sizeof(S) == 1 ? 127.f : 32767.f;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) most = fmaxf(most, fabsf(x[i]));
    most = warp_max(most);
    const float step = most > 0.f ? most / kMost : 1.f;
    if (lane == 0) *scale = step;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      to[lane + 32 * i] = static_cast<S>(fminf(fmaxf(rintf(x[i] / step), -kMost), kMost));
  } else {
    if constexpr (kIsSame<S, __half>) {
      if (p.seed) {
#pragma unroll
        for (int i = 0; i < kColumns; i += 4) {
          const Random bits = state_random(p, row, t, lane + 32 * i);
#pragma unroll
          for (int e = 0; e < 4 && i + e < kColumns; ++e)
            to[lane + 32 * (i + e)] = from_float<S>(round_to_half(x[i + e], bits.x[e]));
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) to[lane + 32 * i] = from_float<S>(x[i]);
  }
}

// The same for numbers of each element, states of integers and stochastic rounding: a warp has one row of a state.
template <class T, class S, int kK>
FI_DEVICE void selective_state_update_elements(const SelectiveStateUpdateParams& p) {
  constexpr int kColumns = kK / 32;
  constexpr bool kIntegers = kIsSame<S, int8_t> || kIsSame<S, int16_t>;
  const uint32_t head_row = divide(blockIdx.x, p.tiles), b = divide(head_row, p.heads);
  const int h = head_row - b * p.heads.value, tile = blockIdx.x - head_row * p.tiles.value, lane = threadIdx.x % 32;
  const int row = tile * p.rows_per_cta + threadIdx.x / 32;
  pdl_wait();
  int64_t begin = 0;
  int tokens = p.tokens;
  if (p.cu_seqlens) {
    const IndexTable offsets{p.cu_seqlens, 1, 0, p.cu_is_wide};
    begin = offsets.at(b);
    tokens = static_cast<int>(offsets.at(b + 1) - begin);
  }
  int64_t start = 0;
  if (p.accepted) start = IndexTable{p.accepted, 1, 0, p.accepted_is_wide}.at(b) - 1;
  const int64_t slot = load_index(p.slots, b, start > 0 ? start : 0), group = divide(h, p.group);
  pdl_launch_dependents();
  if (row >= p.dim || tokens <= 0 || p.is_padding(slot)) return;
  const auto at = [&](const void* base, const int64_t (&strides)[3], int64_t head) {
    return static_cast<const T*>(base) + b * strides[0] + begin * strides[1] + head * strides[2];
  };
  S* states = static_cast<S*>(p.state) + h * p.state_strides[1] + row * p.state_strides[2];
  float* scales = kIntegers ? p.scale + h * p.scale_strides[1] + row * p.scale_strides[2] : nullptr;
  const auto scale_of = [&](int64_t s) { return kIntegers ? scales + s * p.scale_strides[0] : nullptr; };
  const int64_t place = (static_cast<int64_t>(b) * p.heads.value + h) * p.dim + row;  // of random numbers
  float x[kColumns], rate[kColumns];
  const float factor = kIntegers ? *scale_of(slot) : 1.f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const S stored = states[slot * p.state_strides[0] + lane + 32 * i];
    if constexpr (kIntegers) {
      x[i] = factor * static_cast<float>(stored);
    } else {
      x[i] = to_float(stored);
    }
    rate[i] = p.a[h * p.a_stride + row * p.a_dim_stride + (lane + 32 * i) * p.a_column_stride];
  }
  const float bias = p.dt_bias.data ? number(p.dt_bias, h * p.dt_bias_stride + row * p.dt_bias_dim_stride) : 0.f;
  const float skip = p.d.data ? number(p.d, h * p.d_stride + row * p.d_dim_stride) : 0.f;
  for (int t = 0; t < tokens; ++t) {
    const int64_t dt_at =
        b * p.dt_strides[0] + (begin + t) * p.dt_strides[1] + h * p.dt_strides[2] + row * p.dt_dim_stride;
    float dt = number(p.dt, dt_at) + bias, sum = 0.f;
    if (p.softplus) dt = softplus(dt);
    const float value = to_float(at(p.x, p.x_strides, h)[t * p.x_strides[1] + row]);
    const T *in = at(p.b, p.b_strides, group) + t * p.b_strides[1],
            *weights = at(p.c, p.c_strides, group) + t * p.c_strides[1];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      x[i] = expf(dt * rate[i]) * x[i] + dt * value * to_float(in[lane + 32 * i]);
      sum += x[i] * to_float(weights[lane + 32 * i]);
    }
    sum = warp_sum(sum) + skip * value;
    if (p.z) {
      const float gate = to_float(at(p.z, p.z_strides, h)[t * p.z_strides[1] + row]);
      sum *= CudaMath::scaled_sigmoid(gate, gate);
    }
    if (lane == 0) const_cast<T*>(at(p.out, p.out_strides, h))[t * p.out_strides[1] + row] = from_float<T>(sum);
    if (p.intermediate) {
      const int64_t kept = p.intermediate_rows.or_row(b);
      const int64_t *strides = p.intermediate_strides, *own = p.intermediate_scale_strides;
      if (kept >= 0)
        store_state_row(
            p, static_cast<S*>(p.intermediate) + kept * strides[0] + t * strides[1] + h * strides[2] + row * strides[3],
            kIntegers ? p.intermediate_scale + kept * own[0] + t * own[1] + h * own[2] + row * own[3] : nullptr, x,
            place, t);
    }
    if (p.each_token) {
      const int64_t own = p.to_slots.at(b, t);
      if (!p.is_padding(own)) store_state_row(p, states + own * p.state_strides[0], scale_of(own), x, place, t);
    }
  }
  const int64_t to = p.to_slots.data ? load_index(p.to_slots, b) : slot;
  if (p.updates_state && !p.each_token && to >= 0 && !(p.to_slots.data && to == p.pad_slot))
    store_state_row(p, states + to * p.state_strides[0], scale_of(to), x, place, tokens - 1);
}

}  // namespace fi
