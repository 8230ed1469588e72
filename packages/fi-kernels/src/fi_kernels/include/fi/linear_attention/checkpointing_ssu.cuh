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
  const int64_t g = divide(h, p.group);
  if (tokens <= 0) return pdl_launch_dependents();
  const int64_t slot = load_index(p.slots, n);
  // All copies first: what waits for the slot, and for the rows of its ring, comes behind what does not.
  const auto at_token = [&](const void* base, const int64_t (&strides)[3], int64_t head, int t) {
    return static_cast<const T*>(base) + n * strides[0] + (begin + t) * strides[1] + head * strides[2];
  };
  Ring::template each_vector<Ring::kCtaRows>(tokens, cta_rows, [&](int t, int element) {
    cp_async_16(&shared.x[kRingTokens + t][element], at_token(p.x, p.x_strides, h, t) + first_row + element);
  });
  Ring::template each_vector<kK>(tokens, kK, [&](int t, int element) {
    cp_async_16(&shared.b[kRingTokens + t][element], at_token(p.b, p.b_strides, g, t) + element);
    cp_async_16(&shared.c[t][element], at_token(p.c, p.c_strides, g, t) + element);
  });
  const int thread = threadIdx.x;
  const float rate = p.a[h * p.a_stride];
  float new_dt = 0.f;
  if (thread < tokens) {
    new_dt = number(p.dt, n * p.dt_strides[0] + (begin + thread) * p.dt_strides[1] + h * p.dt_strides[2]);
    if (p.dt_bias.data) new_dt += number(p.dt_bias, h * p.dt_bias_stride);
    if (p.softplus) new_dt = softplus(new_dt);
    shared.dt[kRingTokens + thread] = new_dt;
    shared.decay[kRingTokens + thread] = expf(new_dt * rate);
  }
  if (p.is_padding(slot)) {
    cp_async_wait<0>();
    return pdl_launch_dependents();
  }
  const int start = p.start[slot], held = min(p.held[slot], kRingTokens);
  S* own = static_cast<S*>(p.state) + slot * p.state_strides[0] + h * p.state_strides[1] +
           (first_row + row) * p.state_strides[2];
  typename Tile::Words words;
  words.load(own, p.state_strides[2], 1, cta_rows - row);
  T* x_ring = static_cast<T*>(p.x_ring) + slot * p.x_ring_strides[0] + h * p.x_ring_strides[1] + first_row;
  T* b_ring = static_cast<T*>(p.b_ring) + slot * p.b_ring_strides[0] + g * p.b_ring_strides[1];
  float* dt_ring = p.dt_ring + slot * p.dt_ring_strides[0] + h * p.dt_ring_strides[1];
  const auto ring_row = [&](int i) {  // start + i < 3 ring
    int at = start + i;
    at -= at >= p.ring ? p.ring : 0;
    return static_cast<int64_t>(at - (at >= p.ring ? p.ring : 0));
  };
  Ring::template each_vector<Ring::kCtaRows>(held, cta_rows, [&](int i, int element) {
    cp_async_16(&shared.x[i][element], x_ring + ring_row(i) * p.x_ring_strides[2] + element);
  });
  Ring::template each_vector<kK>(held, kK, [&](int i, int element) {
    cp_async_16(&shared.b[i][element], b_ring + ring_row(i) * p.b_ring_strides[2] + element);
  });
  if (thread < held) {
    const float dt = dt_ring[ring_row(thread) * p.dt_ring_strides[2]];
    shared.dt[thread] = dt;
    shared.decay[thread] = expf(dt * rate);
  }
  if (thread < tokens && tile == 0) dt_ring[ring_row(held + thread) * p.dt_ring_strides[2]] = new_dt;
  const float skip = p.d.data ? number(p.d, h * p.d_stride) : 0.f;
  cp_async_wait<0>();
  __syncthreads();
  // The new inputs go behind those held.
  Ring::template each_vector<Ring::kCtaRows>(tokens, cta_rows, [&](int t, int element) {
    store(x_ring + ring_row(held + t) * p.x_ring_strides[2] + element,
          load<T, Ring::kVec>(&shared.x[kRingTokens + t][element]));
  });
  if (tile == 0 && h == g * p.group.value)
    Ring::template each_vector<kK>(tokens, kK, [&](int t, int element) {
      store(b_ring + ring_row(held + t) * p.b_ring_strides[2] + element,
            load<T, Ring::kVec>(&shared.b[kRingTokens + t][element]));
    });

  Tile state(words);
  for (int i = 0; i < held; ++i) Ring::replay(shared, i, row, state);
  if (p.stores_state(held)) state.store(own, p.state_strides[2], 1, cta_rows - row);
  const int kept = row + Ring::kept_row();  // the row of the CTA whose output this lane has, as others of its group
  const bool stores = kept < cta_rows && Tile::lane() % (Tile::kLanes / Ring::kKept) == 0;
  for (int t = 0; t < tokens; ++t) {
    Ring::replay(shared, kRingTokens + t, row, state);
    float weights[Tile::kColumns];
    Ring::columns_of(shared.c[t], weights);
    float result = Ring::multiply(state, weights);
    if (!stores) continue;
    result = fmaf(skip, to_float(shared.x[kRingTokens + t][kept]), result);
    if (p.z) {
      const float gate = to_float(at_token(p.z, p.z_strides, h, t)[first_row + kept]);
      result *= CudaMath::scaled_sigmoid(gate, gate);
    }
    const_cast<T*>(at_token(p.out, p.out_strides, h, t))[first_row + kept] = from_float<T>(result);
  }
  pdl_launch_dependents();
}

}  // namespace fi
