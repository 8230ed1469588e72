// Merges any number of attention states in one pass, by running sums that are rescaled as the maximum rises.
#pragma once
#include "fi/attention/merge/merge_states.h"
#include "fi/cuda/states.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {
namespace merge_states_detail {

// The sum of some states: values are x / total, their log-sum-exp is top + log2(total).
template <int kVec>
struct Sum {
  float top = -infinity(), total = 0.f, x[kVec] = {};

  FI_DEVICE void raise(float to) {
    const float keep = state_weight(top, to);
    top = to;
    total *= keep;
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = weighted(keep, x[i]);
  }
};

}  // namespace merge_states_detail

// Of at most kMost states, in rows of a power of 2 of vectors that lie within a CTA. All loads are issued before one is
// used. Few instructions: see merge_state_compact.
template <class T, int kVec, int kMost>
FI_DEVICE void merge_few_states(const MergeStatesParams& p) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, row = i >> p.lanes.shift;
  const uint32_t n = divide(row, p.heads), head = row - n * p.heads.value, lane = i & (p.lanes.value - 1);
  const T* v = static_cast<const T*>(p.v) + n * p.v_row + head * p.v_head + lane * kVec;
  const float* s = p.s + n * p.s_row + head * p.s_head;
  pdl_wait();
  if (row >= p.rows) return;
  float lse[kMost], top = -infinity(), total = 0.f, sum[kVec] = {};
  Vec<T, kVec> values[kMost];
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    if (j >= p.states) break;
    lse[j] = s[j * p.s_state];
    values[j] = load_streamed<T, kVec>(v + j * p.v_state, p.again);
  }
  pdl_launch_dependents();
#pragma unroll
  for (int j = 0; j < kMost; ++j)
    if (j < p.states) top = fmaxf(top, lse[j]);
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    if (j >= p.states) break;
    const float weight = state_weight(lse[j], top);
    float x[kVec];
    to_float(weight == 0.f ? Vec<T, kVec>{} : values[j], x);  // values of weight zero may be NaN
    total += weight;
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum[e] += weight * x[e];
  }
  const float scale = inverse_total(total);
#pragma unroll
  for (int e = 0; e < kVec; ++e) sum[e] *= scale;
  Vec<T, kVec> merged;
  from_float(sum, merged);
  store(static_cast<T*>(p.out) + int64_t{i} * kVec, merged);
  if (lane == 0) p.out_s[row] = state_lse(top, total);
}

// A row takes lanes * groups threads: group g adds states g, g + groups, ..., kAtOnce at a time; then the groups' sums
// are added in order. The order depends on the number of states and d alone.
template <class T, int kVec, int kAtOnce>
FI_DEVICE void merge_states(const MergeStatesParams& p) {
  __shared__ float shared[(kVec + 2) * 256];
  const int lanes = static_cast<int>(p.lanes.value);
  const uint32_t place = divide(threadIdx.x, p.per_row), in_row = threadIdx.x - place * p.per_row.value;
  const int group = static_cast<int>(divide(in_row, p.lanes)), lane = static_cast<int>(in_row) - group * lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.rows_per_cta + place;
  const bool inside = place < static_cast<uint32_t>(p.rows_per_cta) && row < p.rows;
  const uint32_t n = divide(static_cast<uint32_t>(row), p.heads), head = static_cast<uint32_t>(row) - n * p.heads.value;
  const T* v = static_cast<const T*>(p.v) + n * p.v_row + head * p.v_head;
  const float* s = p.s + n * p.s_row + head * p.s_head;
  pdl_wait();
  for (int base = 0; base < p.d; base += lanes * kVec) {  // once, unless a row has more vectors than a CTA has threads
    const int at = base + lane * kVec;
    const bool mine = inside && at < p.d;
    merge_states_detail::Sum<kVec> sum;
#pragma unroll 1
    for (int64_t k = group; mine && k < p.states; k += kAtOnce * p.groups) {
      float lse[kAtOnce];
      Vec<T, kVec> values[kAtOnce];
      float top = sum.top;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t state = k + j * p.groups;
        lse[j] = -infinity();
        values[j] = Vec<T, kVec>{};
        if (state < p.states) {
          lse[j] = s[state * p.s_state];
          values[j] = load_streamed<T, kVec>(v + state * p.v_state + at, p.again);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) top = fmaxf(top, lse[j]);
      if (k >= kAtOnce * p.groups)
        sum.raise(top);
      else
        sum.top = top;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (j > 0 && k + j * p.groups >= p.states) break;
        const float weight = state_weight(lse[j], top);
        float x[kVec];
        to_float(weight == 0.f ? Vec<T, kVec>{} : values[j], x);  // values of weight zero may be NaN
        sum.total += weight;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum.x[i] += weight * x[i];
      }
    }
    if (base == 0) pdl_launch_dependents();
    if (p.groups > 1) {
      float* mailbox = shared + threadIdx.x;
      __syncthreads();  // of the base before
#pragma unroll
      for (int i = 0; i < kVec; ++i) mailbox[i * 256] = sum.x[i];
      mailbox[kVec * 256] = sum.top;
      mailbox[kVec * 256 + 256] = sum.total;
      __syncthreads();
      for (int g = 1; mine && group == 0 && g < p.groups; ++g) {
        const float* other = mailbox + g * lanes;
        const float other_top = other[kVec * 256], top = fmaxf(sum.top, other_top);
        sum.raise(top);
        const float weight = state_weight(other_top, top), part = weight * other[kVec * 256 + 256];
        sum.total += part;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum.x[i] += part == 0.f ? 0.f : weight * other[i * 256];
      }
    }
    if (mine && group == 0) {
      const float scale = inverse_total(sum.total);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum.x[i] *= scale;
      Vec<T, kVec> merged;
      from_float(sum.x, merged);
      store(static_cast<T*>(p.out) + row * p.d + at, merged);
      if (at == 0) p.out_s[row] = state_lse(sum.top, sum.total);
    }
  }
}

}  // namespace fi
