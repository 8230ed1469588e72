// moe_finalize on sm_80 and later: a thread sums one vector of columns over the experts of a token, in their order.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/find_segment.h"
#include "fi/fused_moe/moe_finalize.h"

namespace fi {

template <int kVec, class T>
FI_DEVICE void load_vector(const T* row, const int32_t* columns, int first, float (&x)[kVec]) {
  if constexpr (kVec > 1) {
    constexpr int kPart = sizeof(T) * kVec <= 16 ? kVec : 16 / sizeof(T);
#pragma unroll
    for (int h = 0; h < kVec; h += kPart) {
      float part[kPart];
      to_float(load<T, kPart>(row + first + h), part);
#pragma unroll
      for (int i = 0; i < kPart; ++i) x[h + i] = part[i];
    }
  } else {
    x[0] = to_float(row[columns ? columns[first] : first]);
  }
}

// sum += weight (y[row] + bias).
template <class T, int kVec>
FI_DEVICE void add_row(const MoeFinalizeParams& p, uint32_t token, int slot, int row, int first, float (&sum)[kVec]) {
  float x[kVec], weight = 1.f;
  load_vector(static_cast<const T*>(p.y) + row * p.y_row_stride, p.columns, first, x);
  if (p.weights) {
    const int64_t at = token * p.weights_token_stride + slot * p.weights_slot_stride;
    weight = p.weight_type == kFloatWeights      ? static_cast<const float*>(p.weights)[at]
             : p.weight_type == kBfloat16Weights ? to_float(static_cast<const __nv_bfloat16*>(p.weights)[at])
                                                 : to_float(static_cast<const __half*>(p.weights)[at]);
  }
  if (p.bias) {
    float bias[kVec];
    const int64_t at = find_segment(p.offsets, p.experts, row) * p.bias_row_stride;
    if (p.bias_is_float)
      load_vector(static_cast<const float*>(p.bias) + at, p.columns, first, bias);
    else
      load_vector(static_cast<const T*>(p.bias) + at, p.columns, first, bias);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] += bias[i];
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
}

// kVec: columns of a thread; 1: any alignment and order.
template <class T, class Out, int kVec>
FI_DEVICE void moe_finalize(const MoeFinalizeParams& p) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, token = divide(index, p.threads_per_row);
  const int first = static_cast<int>(index - token * p.threads_per_row.value) * kVec;
  pdl_wait();
  if (index < p.threads) {
    float sum[kVec] = {};
    const int32_t* positions = p.positions + static_cast<int64_t>(token) * p.top_k;
#pragma unroll 4
    for (int j = 0; j < p.top_k; ++j) {
      const int row = p.positions ? positions[j] : j * p.tokens + static_cast<int>(token);
      if (row >= 0) add_row<T>(p, token, j, row, first, sum);
    }
    if (p.added) {
      float x[kVec];
      load_vector(static_cast<const T*>(p.added) + token * p.added_row_stride, nullptr, first, x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += x[i];
    }
    Out* out = static_cast<Out*>(p.out) + token * p.out_row_stride + first;
    if constexpr (kVec == 1) {
      *out = from_float<Out>(sum[0]);
    } else {
      constexpr int kPart = sizeof(Out) * kVec <= 16 ? kVec : 16 / sizeof(Out);
#pragma unroll
      for (int h = 0; h < kVec; h += kPart) {
        float part[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) part[i] = sum[h + i];
        Vec<Out, kPart> vec;
        from_float(part, vec);
        store(out + h, vec);
      }
    }
  }
  pdl_launch_dependents();
}

}  // namespace fi
