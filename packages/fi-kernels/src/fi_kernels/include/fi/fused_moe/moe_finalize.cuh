// moe_finalize on sm_80 and later: a warp sums columns of one token over its experts, in their order. Its lanes load
// the positions of 32 slots at once, so slots without a row cost nothing.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/find_segment.h"
#include "fi/fused_moe/moe_finalize.h"

namespace fi {

// kVec columns of a row, not yet converted, so that those of several rows are in flight together.
template <class T, int kVec>
struct RowColumns {
  static constexpr int kPart = sizeof(T) * kVec <= 16 ? kVec : 16 / sizeof(T);
  Vec<T, kPart> parts[kVec / kPart];

  // columns: where the row holds each; null, or kVec > 1: in order.
  FI_DEVICE void load(const T* row, const int32_t* columns, int first) {
    if constexpr (kVec == 1) {
      parts[0].v[0] = row[columns ? columns[first] : first];
    } else {
#pragma unroll
      for (int h = 0; h < kVec / kPart; ++h) parts[h] = fi::load<T, kPart>(row + first + h * kPart);
    }
  }
  FI_DEVICE void to_floats(float (&x)[kVec]) const {
#pragma unroll
    for (int h = 0; h < kVec / kPart; ++h) {
      float part[kPart];
      to_float(parts[h], part);
#pragma unroll
      for (int i = 0; i < kPart; ++i) x[h * kPart + i] = part[i];
    }
  }
};

template <int kVec, class T>
FI_DEVICE void load_vector(const T* row, const int32_t* columns, int first, float (&x)[kVec]) {
  RowColumns<T, kVec> loaded;
  loaded.load(row, columns, first);
  loaded.to_floats(x);
}

FI_DEVICE float weight_at(const MoeFinalizeParams& p, int64_t token, int slot) {
  if (!p.weights) return 1.f;
  const int64_t at = token * p.weights_token_stride + slot * p.weights_slot_stride;
  return p.weight_type == kFloatWeights      ? static_cast<const float*>(p.weights)[at]
         : p.weight_type == kBfloat16Weights ? to_float(static_cast<const __nv_bfloat16*>(p.weights)[at])
                                             : to_float(static_cast<const __half*>(p.weights)[at]);
}

// sum += weight (y + bias of the row's expert).
template <class T, int kVec>
FI_DEVICE void add_row(const MoeFinalizeParams& p, int row, float weight, const RowColumns<T, kVec>& y, int first,
                       float (&sum)[kVec]) {
  float x[kVec];
  y.to_floats(x);
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

template <class Out, int kVec>
FI_DEVICE void store_sums(Out* out, const float (&sum)[kVec]) {
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

// kVec: columns of a lane that lie together; 1: any alignment and order. kParts: of them, 32 * kVec columns apart.
template <class T, class Out, int kVec, int kParts>
FI_DEVICE void moe_finalize(const MoeFinalizeParams& p) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kRows = 2;  // in flight
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, token = divide(warp, p.warps_per_row);
  const int begin = (static_cast<int>(warp - token * p.warps_per_row.value) * kParts * 32 + lane) * kVec;
  const auto first = [&](int part) { return begin + part * 32 * kVec; };
  pdl_wait();
  if (token < static_cast<uint32_t>(p.tokens)) {
    float sum[kParts][kVec] = {};
    const int rows = p.offsets ? p.offsets[p.experts] : 0x7fffffff;
    for (int slot = 0; slot < p.top_k; slot += 32) {
      int own_row = -1;
      float own_weight = 0.f;
      if (const int own = slot + lane; own < p.top_k) {
        own_row = p.positions ? p.positions[static_cast<int64_t>(token) * p.top_k + own]
                              : own * p.tokens + static_cast<int>(token);
        own_weight = weight_at(p, token, own);
      }
      for (unsigned left = __ballot_sync(kAll, own_row >= 0 && own_row < rows); left;) {
        int row[kRows];
        float weight[kRows];
        RowColumns<T, kVec> y[kRows][kParts];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int from = left ? __ffs(static_cast<int>(left)) - 1 : 0;
          row[r] = __shfl_sync(kAll, own_row, from);
          weight[r] = __shfl_sync(kAll, own_weight, from);
          if (!left) row[r] = -1;
          left &= left - 1;
#pragma unroll
          for (int i = 0; i < kParts; ++i)
            if (row[r] >= 0 && first(i) < p.width)
              y[r][i].load(static_cast<const T*>(p.y) + row[r] * p.y_row_stride, p.columns, first(i));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int i = 0; i < kParts; ++i)
            if (row[r] >= 0 && first(i) < p.width) add_row<T>(p, row[r], weight[r], y[r][i], first(i), sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (first(i) >= p.width) break;
      if (p.added) {
        float x[kVec];
        load_vector(static_cast<const T*>(p.added) + token * p.added_row_stride, nullptr, first(i), x);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[i][j] += x[j];
      }
      store_sums(static_cast<Out*>(p.out) + token * p.out_row_stride + first(i), sum[i]);
    }
  }
  pdl_launch_dependents();
}

}  // namespace fi
