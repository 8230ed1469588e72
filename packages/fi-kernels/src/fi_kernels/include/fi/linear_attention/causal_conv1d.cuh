// causal_conv1d on sm_80 and later: a thread has a vector of channels and goes through the tokens of its tile with the
// last inputs in registers, so a tile reads only width - 1 tokens that another one reads, too.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/find_segment.h"
#include "fi/linear_attention/causal_conv1d.h"

namespace fi {

// A tile of a sequence that begins at token t of the packed ones has a number from t / tile_tokens + its index on.
// Returns the sequence of a tile; lanes of a warp look at 32 sequences at a time.
FI_DEVICE int conv_sequence(const CausalConv1dParams& p, int tile) {
  int low = 0, count = p.sequences;
  while (count > 1) {
    const int step = (count + 31) / 32, own = static_cast<int>(threadIdx.x % 32) * step;
    const bool before = own < count && p.offsets.at(low + own) / p.tile_tokens + low + own <= tile;
    const int most = __popc(__ballot_sync(0xffffffffu, before)) - 1;
    if (most < 0) return 0;
    low += most * step;
    count = min(step, count - most * step);
  }
  return low;
}

template <class T, int kVec>
FI_DEVICE Vec<T, kVec> load_conv_state(const CausalConv1dParams& p, int64_t slot, int64_t channel, int64_t input) {
  const T* from = static_cast<const T*>(p.states) + slot * p.state_strides[0] + channel * p.state_strides[1] +
                  input * p.state_strides[2];
  Vec<T, kVec> x;
  if (p.state_vectors) {
    x = load<T, kVec>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) x.v[i] = from[i * p.state_strides[1]];
  }
  return x;
}
template <class T, int kVec>
FI_DEVICE void store_conv_state(const CausalConv1dParams& p, int64_t slot, int64_t channel, int64_t input,
                                const Vec<T, kVec>& x) {
  T* to =
      static_cast<T*>(p.states) + slot * p.state_strides[0] + channel * p.state_strides[1] + input * p.state_strides[2];
  if (p.state_vectors) {
    store(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i * p.state_strides[1]] = x.v[i];
  }
}

// kVec: channels of a thread; more than 1 only where channels lie next to each other and weights have no gaps.
template <class T, int kWidth, int kVec>
FI_DEVICE void causal_conv1d(const CausalConv1dParams& p) {
  constexpr int kBefore = kWidth - 1, kStep = 4;  // tokens that are loaded ahead
  const int tile = divide(blockIdx.x, p.channel_tiles);
  const int channel = ((blockIdx.x - tile * p.channel_tiles.value) * blockDim.x + threadIdx.x) * kVec;
  const bool exists = channel < p.dim;
  Vec<T, kVec> zero;
#pragma unroll
  for (int i = 0; i < kVec; ++i) zero.v[i] = from_float<T>(0.f);
  pdl_wait();
  int n = tile;
  int64_t first = 0;
  if (p.tile_tokens) {
    n = conv_sequence(p, tile);
    first = (tile - static_cast<int64_t>(p.offsets.at(n) / p.tile_tokens) - n) * p.tile_tokens;
  }
  float weight[kWidth][kVec], bias[kVec];
  {
    const T* from = static_cast<const T*>(p.weight) + (exists ? channel : 0) * p.weight_strides[0];
    constexpr int kLoad = kVec == 1 ? 1 : 16 / sizeof(T);
    T loaded[kWidth * kVec];
    if constexpr (kVec > 1) {
#pragma unroll
      for (int i = 0; i < kWidth * kVec; i += kLoad) {
        const auto words = load<T, kLoad>(from + i);
        memcpy(loaded + i, &words, sizeof words);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) loaded[k] = from[k * p.weight_strides[1]];
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) weight[k][i] = to_float(loaded[i * kWidth + k]);
      bias[i] = p.bias ? to_float(static_cast<const T*>(p.bias)[(exists ? channel + i : 0) * p.bias_stride]) : 0.f;
    }
  }
  const int64_t length = p.length_of(n);
  if (!exists || first < 0 || first >= length) return pdl_launch_dependents();
  const int64_t end = p.tile_tokens && length - first > p.tile_tokens ? first + p.tile_tokens : length;
  const int64_t row = p.offsets.data ? 0 : n, begin = p.begin_of(n);
  const T* x = static_cast<const T*>(p.x) + row * p.x_strides[0] + begin * p.x_strides[1] + channel * p.x_strides[2];
  T* out = static_cast<T*>(p.out) + row * p.out_strides[0] + begin * p.out_strides[1] + channel * p.out_strides[2];
  const auto input = [&](int64_t t) { return load<T, kVec>(x + t * p.x_strides[1]); };
  Vec<T, kVec> ahead[kStep];
  const auto load_ahead = [&](int64_t t) {
#pragma unroll
    for (int u = 0; u < kStep; ++u) ahead[u] = t + u < end ? input(t + u) : zero;
  };
  load_ahead(first);
  const int64_t from = p.slot_in(n, p.from_column);
  if (p.is_padding(from)) {
    for (int64_t t = first; t < end; ++t) store(out + t * p.out_strides[1], zero);
    return pdl_launch_dependents();
  }
  const bool has_history = p.has_history(n);
  const int64_t first_input = p.first_input(n);
  // An input of the call, or with t < 0 one before it.
  const auto any_input = [&](int64_t t) {
    if (t >= 0) return input(t);
    return has_history ? load_conv_state<T, kVec>(p, from, channel, first_input + kBefore + t) : zero;
  };

  float window[kBefore + kStep][kVec];  // the inputs before those of a step, then these
#pragma unroll
  for (int k = 0; k < kBefore; ++k) to_float(any_input(first - kBefore + k), window[k]);
  for (int64_t t = first; t < end; t += kStep) {
#pragma unroll
    for (int u = 0; u < kStep; ++u) to_float(ahead[u], window[kBefore + u]);
    if (t + kStep < end) load_ahead(t + kStep);
#pragma unroll
    for (int u = 0; u < kStep; ++u) {
      float sum[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sum[i] = bias[i];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum[i] = fmaf(weight[k][i], window[u + k][i], sum[i]);
        constexpr float log2e = 1.4426950408889634f;  // the bound makes silu(-inf) its limit, -0
        if (p.silu) sum[i] = fmaxf(sum[i], -200.f) * reciprocal_approx(1.f + exp2_approx(-log2e * sum[i]));
      }
      Vec<T, kVec> result;
      from_float(sum, result);
      if (t + u < end) store(out + (t + u) * p.out_strides[1], result);
    }
#pragma unroll
    for (int k = 0; k < kBefore; ++k)
#pragma unroll
      for (int i = 0; i < kVec; ++i) window[k][i] = window[kStep + k][i];
  }

  // States. That in the slot of the inputs before is stored by the CTA that has read them, after all others; each other
  // one by the CTA that has its last token. A state is read and stored from the oldest input on, so it may move within
  // its slot.
  const auto store_state = [&](int64_t slot, int64_t after) {
    const int64_t count = p.accepted.data ? kBefore - 1 + after : kBefore;
    for (int64_t i = 0; i < count; i += kBefore) {
      Vec<T, kVec> kept[kBefore];  // all loads first
#pragma unroll
      for (int k = 0; k < kBefore; ++k) kept[k] = i + k < count ? any_input(after - count + i + k) : zero;
#pragma unroll
      for (int k = 0; k < kBefore; ++k)
        if (i + k < count) store_conv_state(p, slot, channel, i + k, kept[k]);
    }
  };
  const int64_t states = p.stored_states(n);
  for (int64_t i = 0; i < states; ++i) {
    const int64_t after = p.stored_after(n, length, i), slot = p.stored_slot(n, from, i);
    if (slot != from && after > first && after <= end && !p.is_padding(slot)) store_state(slot, after);
  }
  for (int64_t i = 0; first == 0 && i < states; ++i)
    if (p.stored_slot(n, from, i) == from) store_state(from, p.stored_after(n, length, i));
  pdl_launch_dependents();
}

}  // namespace fi
