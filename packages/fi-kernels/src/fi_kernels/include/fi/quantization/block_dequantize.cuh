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

template <class In, bool kUe8m0>
FI_DEVICE void block_dequantize(const BlockDequantizeParams& p) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, row = divide(index, p.chunks_per_row);
  const int32_t column = static_cast<int32_t>(index - row * p.chunks_per_row.value) * 8;
  pdl_wait();
  pdl_launch_dependents();
  if (index >= p.chunks) return;
  const uint8_t code = p.scales[scale_offset(p.layout, static_cast<int32_t>(row), column / p.block, p.scale_columns)];
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
  const int64_t chunk = static_cast<int64_t>(row) * p.columns + column;
  values_of(load<uint8_t, bytes>(p.input + chunk * bytes / 8), y, In{});
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = y[i] * scale * global_scale;
#pragma unroll
  for (int i = 0; i < 8; i += 4)
    store_global(p.out + chunk + i, make_uint4(__float_as_uint(y[i]), __float_as_uint(y[i + 1]),
                                               __float_as_uint(y[i + 2]), __float_as_uint(y[i + 3])));
}

}  // namespace fi
