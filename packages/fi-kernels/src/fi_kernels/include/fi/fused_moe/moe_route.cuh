// moe_route on sm_80 and later: a warp chooses the experts of a token; lane l holds the logits of experts 32 i + l.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/fused_moe/moe_route.h"
#include "fi/ordered.h"

namespace fi {

FI_DEVICE float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// The logit; NaN is -inf, -0 is 0.
template <class T>
FI_DEVICE float logit_of(T x) {
  const float logit = canonical(to_float(x));
  return logit != logit ? __int_as_float(0xff800000) : logit;
}

FI_DEVICE float route_bias(const MoeRouteParams& p, int expert) {
  if (p.bias_type == 0) return static_cast<const float*>(p.bias)[expert];
  if (p.bias_type == 1) return to_float(static_cast<const __nv_bfloat16*>(p.bias)[expert]);
  return to_float(static_cast<const __half*>(p.bias)[expert]);
}

// Keeps the keys of the topk_group groups with the largest sums of two scores. `scores` is shared memory of the warp.
template <int kPerLane>
FI_DEVICE void keep_groups(const MoeRouteParams& p, uint32_t (&keys)[kPerLane], float* scores) {
  const int lane = threadIdx.x % 32, size = p.experts / p.n_group;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (32 * i + lane < p.experts) scores[32 * i + lane] = __uint_as_float(unordered(keys[i]));
  __syncwarp();
  uint32_t key = 0;
  if (lane < p.n_group) {
    float first = __int_as_float(0xff800000), second = first;
#pragma unroll 4
    for (int i = 0; i < size; ++i) {
      const float x = scores[lane * size + i];
      second = fmaxf(second, fminf(first, x));
      first = fmaxf(first, x);
    }
    key = ordered(__float_as_uint(canonical(size > 1 ? first + second : first)));
  }
  uint32_t kept = 0;
  for (int g = 0; g < p.topk_group; ++g) {
    const uint32_t best = __reduce_max_sync(0xffffffffu, key);
    const int group = __ffs(__ballot_sync(0xffffffffu, key == best)) - 1;
    kept |= 1u << group;
    if (lane == group) key = 0;
  }
  const uint32_t lowest = ordered(0xff800000u);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (32 * i + lane < p.experts && !(kept >> (32 * i + lane) / size & 1)) keys[i] = lowest;
}

// kPerLane: experts of a lane at most.
template <class T, class Weight, int kPerLane>
FI_DEVICE void moe_route(const MoeRouteParams& p) {
  __shared__ float scores[4][32 * kPerLane];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = static_cast<int>(blockIdx.x * (blockDim.x / 32)) + warp;
  pdl_wait();
  if (token >= p.tokens) return;
  const T* logits = static_cast<const T*>(p.logits) + token * p.logits_row_stride;
  const bool by_sigmoid = routes_by_sigmoid(p.method);
  uint32_t keys[kPerLane];
  float largest = __int_as_float(0xff800000), sum = 0.f;
  {
    float values[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = 32 * i + lane;
      values[i] = expert < p.experts ? logit_of(logits[expert]) : __int_as_float(0xff800000);
      largest = fmaxf(largest, values[i]);
    }
    if (p.method == kRouteDefault || p.method == kRouteRenormalizeNaive) {  // softmax over all
      largest = warp_max(largest);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum += __expf(values[i] - largest);
      sum = warp_sum(sum);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = 32 * i + lane;
      float x = by_sigmoid ? sigmoid(values[i]) : values[i];
      if (p.bias && routes_by_bias(p.method) && expert < p.experts) x += route_bias(p, expert);
      if (x != x) x = __int_as_float(0xff800000);
      keys[i] = expert < p.experts ? ordered(__float_as_uint(canonical(x))) : 0;
    }
  }
  if (p.method == kRouteDeepSeekV3 && p.n_group > 1) keep_groups(p, keys, scores[warp]);

  // Lane j gets the expert of round j.
  int chosen = 0;
#pragma unroll 1
  for (int j = 0; j < p.top_k; ++j) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (keys[i] > best) best = keys[i], at = i;
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, best);
    const unsigned expert = __reduce_min_sync(0xffffffffu, best == of_warp ? 32u * at + lane : 0xffffu);
    if (lane == j) chosen = static_cast<int>(expert);
    if (lane == static_cast<int>(expert % 32)) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (i == static_cast<int>(expert / 32)) keys[i] = 0;
    }
  }
  pdl_launch_dependents();

  const bool owns = lane < p.top_k;
  const float logit = owns ? logit_of(logits[chosen]) : __int_as_float(0xff800000);
  float weight = 0.f;
  switch (p.method) {
    case kRouteDefault:
    case kRouteRenormalizeNaive:
      weight = __expf(logit - largest) / sum;
      break;
    case kRouteRenormalize:
      weight = __expf(logit - warp_max(logit));
      break;
    case kRouteTopK:
      weight = logit;
      break;
    default:
      weight = sigmoid(logit);
  }
  if (!owns || weight != weight) weight = 0.f;  // of softmax over nothing but -inf
  const float total = warp_sum(weight);
  const bool by_sum = p.method == kRouteRenormalize || p.method == kRouteDeepSeekV3 || p.method == kRouteMiniMax2 ||
                      (p.normalize && (p.method == kRouteRenormalizeNaive || p.method == kRouteSigmoidRenorm));
  if (by_sum) weight /= total + 1e-20f;
  if (routes_by_bias(p.method)) weight *= p.scale;
  if (!owns) return;
  const int64_t at = static_cast<int64_t>(token) * p.top_k + lane;
  p.ids[at] = chosen;
  static_cast<Weight*>(p.weights)[at] = from_float<Weight>(weight);
  if (p.replay) p.replay[at] = static_cast<int16_t>(chosen);
}

}  // namespace fi
