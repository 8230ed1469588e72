// Merges two attention states (Juravsky et al. 2024, "Hydragen", arXiv:2402.05099) in one pass.
#pragma once
#include "fi/attention/merge/merge_state.h"
#include "fi/cuda/states.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {

// The weights of two states, which sum to 1, and their log-sum-exp.
struct StatePair {
  float a, b, lse;

  FI_DEVICE StatePair(float s_a, float s_b) {
    const float top = fmaxf(s_a, s_b);
    a = state_weight(s_a, top), b = state_weight(s_b, top);
    const float total = a + b, scale = inverse_total(total);
    lse = state_lse(top, total);
    a *= scale, b *= scale;
  }
  template <class T, int kVec>
  FI_DEVICE Vec<T, kVec> merge(Vec<T, kVec> x, Vec<T, kVec> y) const {
    float f[kVec], g[kVec];
    to_float(a == 0.f ? Vec<T, kVec>{} : x, f);  // values of weight zero may be NaN
    to_float(b == 0.f ? Vec<T, kVec>{} : y, g);
#pragma unroll
    for (int i = 0; i < kVec; ++i) f[i] = a * f[i] + b * g[i];
    from_float(f, x);
    return x;
  }
};

// Of states without gaps, without a mask, whose rows are a power of 2 of vectors and lie within a warp. Few
// instructions and parameters: they come from memory where merges alternate with large kernels
// (docs/notes/elementwise-merge.md).
template <class T, int kVec, int kThreads>
FI_DEVICE void merge_state_compact(const MergeStateParams& p) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x, row = i >> p.lanes.shift;
  const T *a = static_cast<const T*>(p.a.v) + int64_t{i} * kVec, *b = static_cast<const T*>(p.b.v) + int64_t{i} * kVec;
  pdl_wait();
  if (i >= p.vectors) return;
  const float s_a = p.a.s[row], s_b = p.b.s[row];
  const Vec<T, kVec> x = load_streamed<T, kVec>(a, p.again), y = load_streamed<T, kVec>(b, p.again);
  __syncwarp();  // all threads of a row have read s, which may be that of the output
  pdl_launch_dependents();
  const StatePair pair(s_a, s_b);
  store(static_cast<T*>(p.out.v) + int64_t{i} * kVec, pair.merge(x, y));
  if ((i & (p.lanes.value - 1)) == 0) p.out.s[row] = pair.lse;
}

// Of any strides.
template <class T, int kVec>
FI_DEVICE void merge_state(const MergeStateParams& p) {
  const uint32_t place = divide(threadIdx.x, p.lanes), lane = threadIdx.x - place * p.lanes.value;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.rows_per_cta + place;
  const uint32_t n = divide(static_cast<uint32_t>(row), p.heads), head = static_cast<uint32_t>(row) - n * p.heads.value;
  const int64_t first = int64_t{lane} * kVec, step = int64_t{p.lanes.value} * kVec;
  const T* a = static_cast<const T*>(p.a.v) + n * p.a_strides.v_row + head * p.a_strides.v_head;
  const T* b = static_cast<const T*>(p.b.v) + n * p.b_strides.v_row + head * p.b_strides.v_head;
  T* out = static_cast<T*>(p.out.v) + n * p.out_strides.v_row + head * p.out_strides.v_head;
  bool live = place < static_cast<uint32_t>(p.rows_per_cta) && row < p.rows;
  pdl_wait();
  if (p.mask && live) live = p.mask[n] != 0;
  float s_a = 0.f, s_b = 0.f;
  Vec<T, kVec> x, y;
  if (live) {
    s_a = p.a.s[n * p.a_strides.s_row + head * p.a_strides.s_head];
    s_b = p.b.s[n * p.b_strides.s_row + head * p.b_strides.s_head];
    x = load_streamed<T, kVec>(a + first, p.again), y = load_streamed<T, kVec>(b + first, p.again);
  }
  if (p.out.s == p.a.s) __syncthreads();
  pdl_launch_dependents();
  if (!live) return;
  const StatePair pair(s_a, s_b);
  store(out + first, pair.merge(x, y));
  for (int64_t at = first + step; at < p.d; at += step)  // a row of more vectors than a CTA has threads
    store(out + at, pair.merge(load<T, kVec>(a + at), load<T, kVec>(b + at)));
  if (lane == 0) p.out.s[n * p.out_strides.s_row + head * p.out_strides.s_head] = pair.lse;
}

}  // namespace fi
