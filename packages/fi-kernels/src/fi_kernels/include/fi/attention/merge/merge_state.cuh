// Merges two attention states (Juravsky et al. 2024, "Hydragen", arXiv:2402.05099) in one pass.
#pragma once
#include "fi/attention/merge/merge_state.h"
#include "fi/cuda/states.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {
template <class T, int kVec>
FI_DEVICE Vec<T, kVec> combine(const Vec<T, kVec>& a, const Vec<T, kVec>& b, float weight_a, float weight_b) {
  float x[kVec], y[kVec];
  to_float(a, x);
  to_float(b, y);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = weighted(weight_a, x[i]) + weighted(weight_b, y[i]);
  Vec<T, kVec> merged;
  from_float(x, merged);
  return merged;
}

// kRows rows a thread, a block's height apart; all their first loads are issued before one is used.
template <class T, int kVec, int kRows>
FI_DEVICE void merge_state(const MergeStateParams& p) {
  const int height = blockDim.x / p.lanes, place = threadIdx.x / p.lanes, lane = threadIdx.x - place * p.lanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * height * kRows + place;
  const T *a[kRows], *b[kRows];
  float s_a[kRows], s_b[kRows];
  Vec<T, kVec> x[kRows], y[kRows];
  uint32_t n[kRows], head[kRows];
  bool live[kRows];
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + i * height;
    live[i] = place < height && row < p.rows;
    n[i] = divide(static_cast<uint32_t>(row), p.heads);
    head[i] = static_cast<uint32_t>(row) - n[i] * p.heads.value;
    if (p.mask && live[i]) live[i] = p.mask[n[i]] != 0;
    a[i] = static_cast<const T*>(p.a.v) + n[i] * p.a.v_row + head[i] * p.a.v_head + lane * kVec;
    b[i] = static_cast<const T*>(p.b.v) + n[i] * p.b.v_row + head[i] * p.b.v_head + lane * kVec;
    if (live[i]) {
      s_a[i] = p.a.s[n[i] * p.a.s_row + head[i] * p.a.s_head];
      s_b[i] = p.b.s[n[i] * p.b.s_row + head[i] * p.b.s_head];
      x[i] = load<T, kVec>(a[i]);
      y[i] = load<T, kVec>(b[i]);
    }
  }
  if (p.out.s == p.a.s) __syncthreads();  // other threads read s of the same row
  pdl_launch_dependents();
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (live[i]) {
      const float top = fmaxf(s_a[i], s_b[i]);
      float weight_a = state_weight(s_a[i], top), weight_b = state_weight(s_b[i], top);
      const float total = weight_a + weight_b;
      if (lane == 0) p.out.s[n[i] * p.out.s_row + head[i] * p.out.s_head] = state_lse(top, total);
      const float scale = inverse_total(total);
      weight_a *= scale;
      weight_b *= scale;
      T* out = static_cast<T*>(p.out.v) + n[i] * p.out.v_row + head[i] * p.out.v_head + lane * kVec;
      store(out, combine(x[i], y[i], weight_a, weight_b));
      const int step = p.lanes * kVec;
      for (int at = step; lane * kVec + at < p.d; at += step)  // rows of more vectors than a block has threads
        store(out + at, combine(load<T, kVec>(a[i] + at), load<T, kVec>(b[i] + at), weight_a, weight_b));
    }
}

}  // namespace fi
