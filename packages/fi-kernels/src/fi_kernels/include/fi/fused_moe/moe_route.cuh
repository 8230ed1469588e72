// moe_route on sm_80 and later: a warp chooses the experts of a token. A lane has kPerLane neighbouring experts, whose
// scores it sorts; each round takes the largest of the first ones. Lanes and experts have the same order, so ties go to
// the lower number.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/fused_moe/moe_route.h"

namespace fi {

constexpr uint32_t kLowestKey = 0x007fffffu;  // of -infinity

FI_DEVICE float sigmoid(float x) { return reciprocal_approx(1.f + __expf(-x)); }

FI_DEVICE float number(float x) { return fmaxf(x, __uint_as_float(0xff800000u)); }  // NaN is -infinity

// As ordered() of fi/ordered.h, but NaN is -infinity and -0 is 0.
FI_DEVICE uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(number(canonical(x)));
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
FI_DEVICE float of_key(uint32_t key) {
  return __uint_as_float(key ^ (~static_cast<uint32_t>(static_cast<int32_t>(key) >> 31) | 0x80000000u));
}

// Elements first .. first + count - 1 of a row, count <= kCount. vectors: the row and count allow loads of vectors.
template <int kCount, class T>
FI_DEVICE void load_share(const T* row, int first, int count, bool vectors, Vec<T, 4> (&x)[kCount / 4]) {
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      if (4 * i < count) x[i] = load<T, 4>(row + first + 4 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < count) x[i / 4].v[i % 4] = row[first + i];
  }
}

template <int kCount, class T>
FI_DEVICE void load_floats(const void* row, int first, int count, bool vectors, float (&x)[kCount]) {
  Vec<T, 4> loaded[kCount / 4];
  load_share<kCount>(static_cast<const T*>(row), first, count, vectors, loaded);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = to_float(loaded[i / 4].v[i % 4]);
}

// Sorts in falling order: Batcher's odd-even merge sort.
template <int kCount>
FI_DEVICE void sort(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int a = 0; a < 5; ++a)
#pragma unroll
    for (int b = a; b >= 0; --b)
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int p = 1 << a, k = 1 << b, first = k % p;
        if (p >= kCount || i < first || (i - first) % (2 * k) >= k || i + k >= kCount) continue;
        if (i / (2 * p) != (i + k) / (2 * p)) continue;
        const uint32_t larger = max(x[i], x[i + k]);
        x[i + k] = min(x[i], x[i + k]);
        x[i] = larger;
      }
}

// Whether the group of this lane is one of the topk_group groups with the largest sums of two scores.
FI_DEVICE bool keeps_group(const MoeRouteParams& p, uint32_t first, uint32_t second) {
  const int lane = threadIdx.x % 32, own = lane >> p.group_bits;
  for (int step = 1; step < 1 << p.group_bits; step *= 2) {
    const uint32_t a = __shfl_xor_sync(0xffffffffu, first, step), b = __shfl_xor_sync(0xffffffffu, second, step);
    second = max(min(first, a), max(second, b));
    first = max(first, a);
  }
  const uint32_t key = key_of(p.group_size > 1 ? of_key(first) + of_key(second) : of_key(first));
  int before = 0;
  for (int g = 0; g < p.n_group; ++g) {
    const uint32_t other = __shfl_sync(0xffffffffu, key, g << p.group_bits);
    before += other > key || (other == key && g < own);
  }
  return before < p.topk_group;
}

// kPerLane: experts of a lane at most; kPerLane << group_bits >= group_size.
template <class T, class Weight, int kPerLane>
FI_DEVICE void moe_route(const MoeRouteParams& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = static_cast<int>(blockIdx.x * (blockDim.x / 32)) + warp;
  if (token >= p.tokens) return;
  const int group = lane >> p.group_bits, in_group = (lane - (group << p.group_bits)) * kPerLane;
  const int first = group * p.group_size + in_group;
  const int count = group < p.n_group ? min(max(p.group_size - in_group, 0), kPerLane) : 0;
  pdl_wait();
  const T* logits = static_cast<const T*>(p.logits) + token * p.logits_row_stride;

  Vec<T, 4> loaded[kPerLane / 4] = {};
  load_share<kPerLane>(logits, first, count, p.vectors, loaded);
  uint32_t own[kPerLane];  // in order of experts; 0: none
  if (routes_by_sigmoid(p.method)) {
    float bias[kPerLane] = {};
    if (p.bias && routes_by_bias(p.method)) {
      if (p.bias_type == 0)
        load_floats<kPerLane, float>(p.bias, first, count, p.vectors, bias);
      else if (p.bias_type == 1)
        load_floats<kPerLane, __nv_bfloat16>(p.bias, first, count, p.vectors, bias);
      else
        load_floats<kPerLane, __half>(p.bias, first, count, p.vectors, bias);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) own[i] = key_of(sigmoid(number(to_float(loaded[i / 4].v[i % 4]))) + bias[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) own[i] = key_of(to_float(loaded[i / 4].v[i % 4]));
  }
  pdl_launch_dependents();
  if (count < kPerLane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i >= count) own[i] = 0;
  }
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) keys[i] = own[i];
  sort(keys);
  if (p.n_group > 1 && !keeps_group(p, keys[0], keys[1])) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = own[i] = i < count ? kLowestKey : 0;
  }

  // Lane j gets the key of round j and the lane that had it.
  uint32_t key = 0;
  int source = 0;
#pragma unroll 1
  for (int j = 0; j < p.top_k; ++j) {
    const uint32_t largest = __reduce_max_sync(0xffffffffu, keys[0]);
    const int winner = __ffs(__ballot_sync(0xffffffffu, keys[0] == largest)) - 1;
    if (lane == j) key = largest, source = winner;
    if (lane == winner) {
#pragma unroll
      for (int i = 0; i + 1 < kPerLane; ++i) keys[i] = keys[i + 1];
      keys[kPerLane - 1] = 0;
    }
  }
  // A lane gives equal keys in rounds behind each other, in their order: so many rounds just before had the same.
  const uint32_t key_before = __shfl_up_sync(0xffffffffu, key, 1);
  const int source_before = __shfl_up_sync(0xffffffffu, source, 1);
  const bool again = lane > 0 && lane < p.top_k && key == key_before && source == source_before;
  int skipped = __clz(~__ballot_sync(0xffffffffu, again) << (31 - lane));
  uint32_t places = 0;  // of the key in its lane
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (__shfl_sync(0xffffffffu, own[i], source) == key) places |= 1u << i;
#pragma unroll 1
  for (; skipped > 0; --skipped) places &= places - 1;
  const int chosen = __shfl_sync(0xffffffffu, first, source) + __ffs(places) - 1;

  const bool owns = lane < p.top_k;
  const float top = of_key(__shfl_sync(0xffffffffu, key, 0));
  float weight = of_key(key);  // the logit, or its sigmoid
  bool by_sum;
  if (p.method <= kRouteRenormalize || p.method == kRouteRenormalizeNaive) {  // softmax
    weight = __expf(weight - top);
    by_sum = p.method != kRouteDefault;
    if (!by_sum) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (own[i]) sum += __expf(of_key(own[i]) - top);
      weight *= reciprocal_approx(warp_sum(sum));
    }
  } else if (routes_by_bias(p.method)) {
    by_sum = true;
    if (owns) weight = sigmoid(number(to_float(logits[chosen])));
  } else {
    by_sum = p.normalize && p.method == kRouteSigmoidRenorm;
    if (p.method == kRouteLlama4 || p.method == kRouteTopKSigmoid) weight = sigmoid(weight);
  }
  if (!owns || weight != weight) weight = 0.f;  // of softmax over nothing but -inf
  if (by_sum) weight *= reciprocal_approx(warp_sum(weight, p.top_k <= 8 ? 8 : 32) + 1e-20f);
  if (routes_by_bias(p.method)) weight *= p.scale;
  if (lane >= p.top_k + p.shared) return;
  const int64_t at = static_cast<int64_t>(token) * (p.top_k + p.shared) + lane;
  p.ids[at] = owns ? chosen : p.experts + lane - p.top_k;
  static_cast<Weight*>(p.weights)[at] = from_float<Weight>(owns ? weight : 1.f);
  if (p.replay && owns) p.replay[static_cast<int64_t>(token) * p.top_k + lane] = static_cast<int16_t>(chosen);
}

}  // namespace fi
