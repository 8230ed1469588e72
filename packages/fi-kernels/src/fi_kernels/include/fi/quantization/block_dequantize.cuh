// block_dequantize on sm_80 and later: a thread computes 8 neighbouring elements.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/quantization/block_dequantize.h"
#include "fi/quantization/e2m1.cuh"

namespace fi {

// Eight values from their bytes.
FI_DEVICE void values_of(const Vec<uint8_t, 4>& x, float (&y)[8], E2m1) {
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = e2m1_to_float(x.v[i / 2] >> (4 * (i % 2)));
}
template <class In>
FI_DEVICE void values_of(const Vec<uint8_t, 8>& x, float (&y)[8], In value) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    value.__x = x.v[i];
    y[i] = to_float(value);
  }
}

template <class In>
constexpr int kBytesOfEight = 8;
template <>
constexpr int kBytesOfEight<E2m1> = 4;

template <class In, class Out, bool kUe8m0>
FI_DEVICE void block_dequantize(const BlockDequantizeParams& p) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, line = divide(index, p.chunks_per_row);
  const int32_t column = static_cast<int32_t>(index - line * p.chunks_per_row.value) * 8;
  pdl_wait();
  pdl_launch_dependents();
  if (index >= p.chunks) return;
  const uint32_t matrix = divide(line, p.rows_per_matrix), row = line - matrix * p.rows_per_matrix.value;
  const uint8_t code = p.scales[matrix * p.scale_batch_stride +
                                scale_offset(p.layout, static_cast<int32_t>(row), column / p.block, p.scale_columns)];
  float scale;
  if constexpr (kUe8m0) {
    scale = code == 255 ? __uint_as_float(0x7fffffffu) : __uint_as_float(code ? code << 23 : 0x00400000u);
  } else {
    __nv_fp8_e4m3 x;
    x.__x = code;
    scale = to_float(x);
  }
  const float global_scale = p.global_scale ? *p.global_scale : 1.f;
  float y[8];
  constexpr int bytes = kBytesOfEight<In>;
  const uint8_t* from = p.input + matrix * p.input_batch_stride + row * p.input_row_stride + column * bytes / 8;
  values_of(load<uint8_t, bytes>(from), y, In{});
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = y[i] * scale * global_scale;
  constexpr int vec = 16 / sizeof(Out);
  Out* to = static_cast<Out*>(p.out) + static_cast<int64_t>(line) * p.columns + column;
#pragma unroll
  for (int i = 0; i < 8; i += vec) {
    float part[vec];
#pragma unroll
    for (int e = 0; e < vec; ++e) part[e] = y[i + e];
    Vec<Out, vec> packed;
    from_float(part, packed);
    store(to + i, packed);
  }
}

}  // namespace fi
