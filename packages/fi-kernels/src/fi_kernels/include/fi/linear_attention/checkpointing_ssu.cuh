// checkpointing_ssu on sm_80 and later: a CTA holds rows of a state in registers; all inputs are in shared memory
// before the first token, so a state is read once while the tokens' inputs arrive. Tokens follow one another, with the
// operations of selective_state_update: the bits do not depend on which tokens are replayed and which are new.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/linear_attention/ring_tokens.cuh"

namespace fi {

template <class T, class S, int kK, int kRows, int kSharedBytes>
FI_DEVICE void checkpointing_ssu(const CheckpointingSsuParams& p) {
  using Ring = RingTokens<T, S, kK, kRows>;
  using Tile = typename Ring::Tile;
  auto& shared = dynamic_shared<typename Ring::Shared, 16, kSharedBytes>();
  const uint32_t head_row = divide(blockIdx.x, p.tiles), n = divide(head_row, p.heads);
  const int h = head_row - n * p.heads.value, tile = blockIdx.x - head_row * p.tiles.value;
  const int first_row = tile * Ring::kCtaRows, cta_rows = min(Ring::kCtaRows, p.dim - first_row);
  const int row = threadIdx.x / 32 * Tile::kWarpRows + Tile::first_row();  // of the CTA, the first of this lane
  pdl_wait();
  int64_t begin = 0;
  int tokens = p.tokens;
  if (p.cu_seqlens) {
    const IndexTable offsets{p.cu_seqlens, 1, 0, p.cu_is_wide};
    begin = offsets.at(n);
    tokens = static_cast<int>(min(offsets.at(n + 1) - begin, static_cast<int64_t>(p.tokens)));
  }
  const int64_t slot = load_index(p.slots, n), g = divide(h, p.group);
  if (tokens <= 0 || p.is_padding(slot)) return pdl_launch_dependents();
  const int start = p.start[slot], held = min(p.held[slot], kRingTokens), end = held + tokens;
  S* own = static_cast<S*>(p.state) + slot * p.state_strides[0] + h * p.state_strides[1] +
           (first_row + row) * p.state_strides[2];
  typename Tile::Words words;
  words.load(own, p.state_strides[2], 1, cta_rows - row);

  const auto at_token = [&](const void* base, const int64_t (&strides)[3], int64_t head, int t) {
    return static_cast<const T*>(base) + n * strides[0] + (begin + t) * strides[1] + head * strides[2];
  };
  T* x_ring = static_cast<T*>(p.x_ring) + slot * p.x_ring_strides[0] + h * p.x_ring_strides[1] + first_row;
  T* b_ring = static_cast<T*>(p.b_ring) + slot * p.b_ring_strides[0] + g * p.b_ring_strides[1];
  float* dt_ring = p.dt_ring + slot * p.dt_ring_strides[0] + h * p.dt_ring_strides[1];
  const bool stores_b = tile == 0 && h == g * p.group.value;
  Ring::load_rows(
      shared.x, 0, end, cta_rows,
      [&](int i) -> const T* {
        return i < held ? x_ring + p.ring_row(start, i) * p.x_ring_strides[2]
                        : at_token(p.x, p.x_strides, h, i - held) + first_row;
      },
      [&](int i, int element, const typename Ring::Words& vec) {
        if (i >= held) store(x_ring + p.ring_row(start, i) * p.x_ring_strides[2] + element, vec);
      });
  Ring::load_rows(
      shared.b, 0, end, kK,
      [&](int i) -> const T* {
        return i < held ? b_ring + p.ring_row(start, i) * p.b_ring_strides[2] : at_token(p.b, p.b_strides, g, i - held);
      },
      [&](int i, int element, const typename Ring::Words& vec) {
        if (i >= held && stores_b) store(b_ring + p.ring_row(start, i) * p.b_ring_strides[2] + element, vec);
      });
  Ring::load_rows(
      shared.c, 0, tokens, kK, [&](int i) -> const T* { return at_token(p.c, p.c_strides, g, i); },
      [](int, int, const typename Ring::Words&) {});
  if (threadIdx.x < end) {
    const int i = threadIdx.x;
    float* kept = dt_ring + p.ring_row(start, i) * p.dt_ring_strides[2];
    float dt;
    if (i < held) {
      dt = *kept;
    } else {
      dt = number(p.dt, n * p.dt_strides[0] + (begin + i - held) * p.dt_strides[1] + h * p.dt_strides[2]);
      if (p.dt_bias.data) dt += number(p.dt_bias, h * p.dt_bias_stride);
      if (p.softplus) dt = softplus(dt);
      if (tile == 0) *kept = dt;
    }
    shared.dt[i] = dt;
    shared.decay[i] = expf(dt * p.a[h * p.a_stride]);
  }
  const float skip = p.d.data ? number(p.d, h * p.d_stride) : 0.f;
  __syncthreads();

  Tile state(words);
  float value[kRows];
  for (int i = 0; i < held; ++i) Ring::replay(shared, i, row, state, value);
  if (p.stores_state(held)) state.store(own, p.state_strides[2], 1, cta_rows - row);
  const int kept = row + Ring::kept_row();  // the row of the CTA whose output this lane has, as others of its group
  const bool stores = kept < cta_rows && Tile::lane() % (Tile::kLanes / Ring::kKept) == 0;
  for (int t = 0; t < tokens; ++t) {
    Ring::replay(shared, held + t, row, state, value);
    float weights[Tile::kColumns];
    Ring::columns_of(shared.c[t], weights);
    float result = Ring::multiply(state, weights);
    if (!stores) continue;
    result = fmaf(skip, shared.x[held + t][kept], result);
    if (p.z) {
      const float gate = to_float(at_token(p.z, p.z_strides, h, t)[first_row + kept]);
      result *= CudaMath::scaled_sigmoid(gate, gate);
    }
    const_cast<T*>(at_token(p.out, p.out_strides, h, t))[first_row + kept] = from_float<T>(result);
  }
  pdl_launch_dependents();
}

}  // namespace fi
