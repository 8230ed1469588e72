// moe_activation on sm_80 and later: a thread computes 16 columns of a row.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/find_segment.h"
#include "fi/fused_moe/e4m3_block.cuh"
#include "fi/fused_moe/moe_activation.h"

namespace fi {

// Columns first .. first + 15 of a row; beyond `width` zeros. kVectors: aligned, whole, and in order.
template <bool kVectors, class T>
FI_DEVICE void load_columns(const T* row, const int32_t* columns, int first, int count, int shift, float (&x)[16]) {
  if constexpr (kVectors) {
    constexpr int kVec = 16 / sizeof(T);
#pragma unroll
    for (int h = 0; h < 16 / kVec; ++h) {
      float part[kVec];
      to_float(load<T, kVec>(row + shift + first + kVec * h), part);
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[kVec * h + i] = part[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int at = shift + first + i;
      x[i] = i < count ? to_float(row[columns ? columns[at] : at]) : 0.f;
    }
  }
}

template <bool kVectors, class T>
FI_DEVICE void add_bias(const MoeActivationParams& p, int expert, int first, int count, int shift, float (&x)[16]) {
  float bias[16];
  const int64_t at = expert * p.bias_row_stride;
  if (p.bias_is_float)
    load_columns<kVectors>(static_cast<const float*>(p.bias) + at, p.columns, first, count, shift, bias);
  else
    load_columns<kVectors>(static_cast<const T*>(p.bias) + at, p.columns, first, count, shift, bias);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] += bias[i];
}

template <bool kVectors, class T>
FI_DEVICE void add_delta(const MoeActivationParams& p, int64_t row, int first, int count, int shift, float (&x)[16]) {
  float delta[16];
  load_columns<kVectors>(static_cast<const T*>(p.delta) + row * p.delta_row_stride, nullptr, first, count, shift,
                         delta);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] += delta[i];
}

template <class T, class Out, ExpertActivation kAct, bool kVectors>
FI_DEVICE void activate_columns(const MoeActivationParams& p, uint32_t row, int first, bool works) {
  const int count = min(16, p.width - first);
  float u[16] = {};
  if (works) {
    float g[16] = {};
    const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
    load_columns<kVectors>(x, p.columns, first, count, 0, u);
    if constexpr (is_gated(kAct)) load_columns<kVectors>(x, p.columns, first, count, p.width, g);
    if (p.delta) {
      add_delta<kVectors, T>(p, row, first, count, is_gated(kAct) ? p.width : 0, u);
      if constexpr (is_gated(kAct)) add_delta<kVectors, T>(p, row, first, count, 0, g);
    }
    ExpertConstants constants = p.constants;
    float factor = 1.f;
    if (p.bias || p.alpha || p.beta || p.limit || p.quant) {
      const int expert = find_segment(p.offsets, p.experts, row);
      if (p.bias) {
        add_bias<kVectors, T>(p, expert, first, count, 0, u);
        if constexpr (is_gated(kAct)) add_bias<kVectors, T>(p, expert, first, count, p.width, g);
      }
      if (p.alpha) constants.alpha = p.alpha[expert];
      if (p.beta) constants.beta = p.beta[expert];
      if (p.limit) constants.limit = p.limit[expert];
      if (p.quant) factor = p.quant[expert * p.quant_stride];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) u[i] = activate_expert<CudaMath, kAct>(u[i], g[i], constants) * factor;
  }
  float scale = 1.f;
  if (p.out_scale) scale = scale_block(u);
  if (!works) return;
  Out* out = static_cast<Out*>(p.out) + row * p.out_row_stride + first;
  if constexpr (kVectors) {
    constexpr int kVec = 16 / sizeof(Out);
#pragma unroll
    for (int h = 0; h < 16 / kVec; ++h) {
      float part[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) part[i] = u[kVec * h + i];
      Vec<Out, kVec> vec;
      from_float(part, vec);
      store(out + kVec * h, vec);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) out[i] = from_float<Out>(u[i]);
  }
  if (p.out_scale && first % 128 == 0) p.out_scale[row * static_cast<int64_t>(p.width / 128) + first / 128] = scale;
}

// Rows of no expert cost nothing: the CTAs walk the rows that exist, whose number is on the device.
template <class T, class Out, ExpertActivation kAct, bool kVectors>
FI_DEVICE void moe_activation(const MoeActivationParams& p) {
  pdl_wait();
  const uint32_t rows = min(p.rows, max(p.offsets[p.experts], 0)), threads = rows * p.threads_per_row.value;
  for (uint32_t first = blockIdx.x * blockDim.x; first < threads; first += gridDim.x * blockDim.x) {
    const uint32_t index = first + threadIdx.x, row = divide(index, p.threads_per_row);
    const int column = static_cast<int>(index - row * p.threads_per_row.value) * 16;
    activate_columns<T, Out, kAct, kVectors>(p, row, column, index < threads);
  }
  pdl_launch_dependents();
}

}  // namespace fi
