// replayssm_materialize on sm_80 and later: a CTA replays the inputs in a ring into rows of a state, in registers.
#pragma once
#include "fi/cuda/shared_memory.cuh"
#include "fi/linear_attention/replayssm_materialize.h"
#include "fi/linear_attention/ring_tokens.cuh"

namespace fi {

template <class T, class S, int kK, int kRows, int kSharedBytes>
FI_DEVICE void replayssm_materialize(const ReplayssmMaterializeParams& p) {
  using Ring = RingTokens<T, S, kK, kRows>;
  using Tile = typename Ring::Tile;
  auto& shared = dynamic_shared<typename Ring::Shared, 16, kSharedBytes>();
  const uint32_t head_row = divide(blockIdx.x, p.tiles), item = divide(head_row, p.heads);
  const int h = head_row - item * p.heads.value, tile = blockIdx.x - head_row * p.tiles.value;
  const int layer = divide(item, p.requests), place = item - layer * p.requests.value;
  const int first_row = tile * Ring::kCtaRows, cta_rows = min(Ring::kCtaRows, p.dim - first_row);
  const int row = threadIdx.x / 32 * Tile::kWarpRows + Tile::first_row();
  pdl_wait();
  const int n = p.active[place];
  if (n < 0 || n >= p.batch) return pdl_launch_dependents();
  const int64_t from = p.from[layer * p.from_stride + n], to = p.to[layer * p.to_stride + n];
  if (from == p.pad_slot || to == p.pad_slot || from < 0 || to < 0) return pdl_launch_dependents();
  const int start = p.start[n], length = min(p.length[n], kRingTokens);
  S* states = reinterpret_cast<S*>(p.states[layer]) + (static_cast<int64_t>(h) * p.dim + first_row + row) * kK;
  typename Tile::Words words;
  words.load(states + from * p.state_strides[layer], kK, 1, cta_rows - row);
  const int64_t g = divide(h, p.group);
  const T* x_ring = reinterpret_cast<const T*>(p.x_rings[layer]) + from * p.x_ring_strides[layer] +
                    static_cast<int64_t>(h) * p.ring * p.dim + first_row;
  const T* b_ring = reinterpret_cast<const T*>(p.b_rings[layer]) + from * p.b_ring_strides[layer] + g * p.ring * kK;
  const float* dt_ring = reinterpret_cast<const float*>(p.dt_rings[layer]) + from * p.dt_ring_strides[layer] +
                         static_cast<int64_t>(h) * p.ring;
  Ring::template each_vector<Ring::kCtaRows>(length, cta_rows, [&](int i, int element) {
    cp_async_16(&shared.x[i][element], x_ring + p.ring_row(start, i) * p.dim + element);
  });
  Ring::template each_vector<kK>(length, kK, [&](int i, int element) {
    cp_async_16(&shared.b[i][element], b_ring + p.ring_row(start, i) * kK + element);
  });
  const int thread = threadIdx.x;
  if (thread < length) {
    const float rate = number({reinterpret_cast<const void*>(p.a[layer]), p.a_type}, h);
    const float dt = dt_ring[p.ring_row(start, thread)];
    shared.dt[thread] = dt;
    shared.decay[thread] = expf(dt * rate);
  }
  cp_async_wait<0>();
  __syncthreads();
  Tile state(words);
  for (int i = 0; i < length; ++i) Ring::replay(shared, i, row, state);
  state.store(states + to * p.state_strides[layer], kK, 1, cta_rows - row);
  pdl_launch_dependents();
}

}  // namespace fi
