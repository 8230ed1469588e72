// moe_gather on sm_80 and later: threads index the vectors of all tokens, and write each to all rows of its token.
#pragma once
#include "fi/fused_moe/e4m3_block.cuh"
#include "fi/fused_moe/moe_gather.h"

namespace fi {

// A thread copies kVecs vectors of kBytes that are next to each other.
template <int kBytes, int kVecs>
FI_DEVICE void moe_gather_copy(const MoeGatherParams& p) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, token = divide(index, p.threads_per_row);
  const int column = static_cast<int>(index - token * p.threads_per_row.value);
  pdl_wait();
  if (index < p.threads) {
    const char* from = static_cast<const char*>(p.x) + token * p.x_row_bytes + column * (kBytes * kVecs);
    const int32_t* positions = p.positions + static_cast<int64_t>(token) * p.top_k;
    Vec<char, kBytes> x[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) x[i] = load<char, kBytes>(from + i * kBytes);
    for (int j = 0; j < p.top_k; ++j) {
      const int row = positions[j];
      if (row < 0) continue;
      char* to = static_cast<char*>(p.out) + row * p.out_row_bytes + column * (kBytes * kVecs);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) store(to + i * kBytes, x[i]);
      for (int b = column; p.x_scale && b < p.blocks; b += static_cast<int>(p.threads_per_row.value))
        p.out_scale[static_cast<int64_t>(row) * p.blocks + b] =
            p.x_scale[token * p.x_scale_row_stride + b * p.x_scale_block_stride];
    }
  }
  pdl_launch_dependents();
}

// A thread quantizes 16 columns; eight lanes share a scale.
template <class T>
FI_DEVICE void moe_gather_quantize(const MoeGatherParams& p) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, token = divide(index, p.threads_per_row);
  const int column = static_cast<int>(index - token * p.threads_per_row.value);
  const bool works = index < p.threads;
  pdl_wait();
  float x[16] = {};
  if (works) {
    const T* from = reinterpret_cast<const T*>(static_cast<const char*>(p.x) + token * p.x_row_bytes) + column * 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float half[8];
      to_float(load<T, 8>(from + 8 * h), half);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[8 * h + i] = half[i];
    }
  }
  const float scale = scale_block(x);
  if (works) {
    Vec<__nv_fp8_e4m3, 16> out;
    from_float(x, out);
    const int32_t* positions = p.positions + static_cast<int64_t>(token) * p.top_k;
    for (int j = 0; j < p.top_k; ++j) {
      const int row = positions[j];
      if (row < 0) continue;
      store(reinterpret_cast<__nv_fp8_e4m3*>(static_cast<char*>(p.out) + row * p.out_row_bytes) + column * 16, out);
      if (column % 8 == 0) p.out_scale[static_cast<int64_t>(row) * p.blocks + column / 8] = scale;
    }
  }
  pdl_launch_dependents();
}

}  // namespace fi
