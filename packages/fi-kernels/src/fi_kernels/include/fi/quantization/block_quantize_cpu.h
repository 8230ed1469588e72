// Block quantization on a CPU, with the bits of the CUDA kernel: one row of one matrix at a time.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "fi/cpu/math.h"
#include "fi/cpu/parallel.h"
#include "fi/cpu/reduce.h"
#include "fi/cpu/row_convert.h"
#include "fi/quantization/block_quantize.h"

namespace fi::cpu {
namespace detail {

// gate = silu(gate) * up
inline FI_CLONES void gate_row(float* gate, const float* up, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) gate[i] = silu(gate[i]) * up[i];
}

FI_INLINE float canonical(float x) { return x != x ? bits_float(0x7fc00000u) : x; }

// NaN becomes the positive one, which conversion instructions of a GPU give.
inline FI_CLONES void canonical_row(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = canonical(x[i]);
}

inline FI_CLONES float largest_magnitude(const float* x, int64_t n) {
  return std::max(0.f, maximum(n, [=](int64_t i) __attribute__((always_inline)) { return magnitude(x[i]); }));
}

inline FI_CLONES void multiply(const float* x, float* y, float factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor;
}

inline FI_CLONES void divide(const float* x, float* y, float divisor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] / divisor;
}

// The e2m1 codes of y with the signs of x, two in a byte; NaN becomes 6.
inline FI_CLONES void store_e2m1(const float* x, const float* y, uint8_t* out, int64_t n) {
  const auto code = [=](int64_t i) __attribute__((always_inline)) {
    const uint32_t encoded = std::min(encode_magnitude<2, 1>(float_bits(y[i]) & ~kSignMask), 7u);
    return encoded | float_bits(x[i]) >> 31 << 3;
  };
#pragma omp simd
  for (int64_t i = 0; i < n / 2; ++i) out[i] = static_cast<uint8_t>(code(2 * i) | code(2 * i + 1) << 4);
}

inline FI_CLONES void store_int8(const float* y, int8_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = y[i] != y[i] ? 0 : static_cast<int8_t>(std::nearbyint(std::min(std::max(y[i], -128.f), 127.f)));
}

inline float limit_of(DType out) {
  return out == kU8 ? kE2m1Limit : out == kE4M3 ? kE4m3Limit : out == kE5M2 ? kE5m2Limit : kInt8Limit;
}

// Computes y, the quotients of a block by its scale; returns the bits of the scale as it is stored.
inline uint32_t scale_block(const float* x, float* y, int64_t n, ScaleFormat format, float limit, float global_scale,
                            float eps) {
  const float amax = largest_magnitude(x, n);
  if (format == kE4m3Scale) {
    const uint32_t code = from_float<e4m3_t>(canonical(scaled_amax(amax, global_scale))).bits;
    const float scale = to_float(e4m3_t{static_cast<uint8_t>(code & 0x7f)});
    multiply(x, y, inverse_scale(scale, global_scale), n);
    return code;
  }
  if (format == kFloatScale) {
    const float scale = std::max(amax, eps) / limit;
    if (scale == 0.f) {
      multiply(x, y, 0.f, n);
    } else {
      divide(x, y, scale, n);
    }
    return float_bits(scale);
  }
  const float largest = format == kUe8m0Scale ? amax : std::max(amax, eps);
  const uint32_t exponent = ceil_exponent(float_bits(largest), float_bits(limit));
  multiply(x, y, bits_float(power_of_two_bits(254 - exponent)), n);
  return format == kUe8m0Scale ? exponent : power_of_two_bits(exponent);
}

}  // namespace detail

// Quantizes one row: x has p.columns valid elements of p.width, the rest is zero; y is scratch.
inline void quantize_row(const BlockQuantizeParams& p, int32_t batch, int32_t row, float* x, float* y, DType out_type,
                         ScaleFormat format, int32_t block, float global_scale) {
  const int32_t target = p.shuffle ? shuffled_row(row) : row;
  uint8_t* out = static_cast<uint8_t*>(p.out) + batch * p.out_batch_stride + target * p.out_row_stride;
  const bool bytes = format == kE4m3Scale || format == kUe8m0Scale;
  for (int32_t column = 0; column < p.width; column += block) {
    const int32_t index = column / block;
    const uint32_t scale =
        detail::scale_block(x + column, y + column, block, format, detail::limit_of(out_type), global_scale, p.eps);
    if (bytes) {
      static_cast<uint8_t*>(p.scales)[static_cast<int64_t>(batch) * p.padded_rows * p.scale_columns +
                                      scale_offset(p.layout, target, index, p.scale_columns)] =
          static_cast<uint8_t>(scale);
    } else {
      static_cast<float*>(p.scales)[row * p.scale_row_stride + index * p.scale_column_stride] = bits_float(scale);
    }
  }
  if (out_type == kU8) return detail::store_e2m1(x, y, out, p.width);
  if (out_type.code == kDLInt) return detail::store_int8(y, reinterpret_cast<int8_t*>(out), p.width);
  detail::canonical_row(y, p.width);
  row_storer(out_type)(y, out, p.width);
}

inline void block_quantize(const BlockQuantizeParams& p, DType dtype, DType out_type, ScaleFormat format, int32_t block,
                           bool gated) {
  const LoadRow load = row_loader(dtype);
  const StoreRow store = gated ? row_storer(dtype) : nullptr;
  const int64_t bytes = dtype.bytes();
  const bool byte_scales = format == kE4m3Scale || format == kUe8m0Scale;
  parallel_for(
      static_cast<int64_t>(p.batch) * p.padded_rows, std::max(1, 16384 / p.width), [&](int64_t begin, int64_t end) {
        std::vector<float> x(static_cast<size_t>(p.width)), y(x.size());
        std::vector<char> rounded(gated ? x.size() * static_cast<size_t>(bytes) : 0);
        for (int64_t index = begin; index < end; ++index) {
          const auto batch = static_cast<int32_t>(index / p.padded_rows),
                     row = static_cast<int32_t>(index % p.padded_rows);
          const int32_t rows = p.mask ? std::max(0, std::min(p.rows, p.mask[batch])) : p.rows;
          if (p.mask && row >= (rows + 127) / 128 * 128) continue;
          if (byte_scales && p.layout != kScalesLinear) {  // whole rows of scales, so that the padding is 0
            uint8_t* scales =
                static_cast<uint8_t*>(p.scales) + static_cast<int64_t>(batch) * p.padded_rows * p.scale_columns;
            const int32_t target = p.shuffle && row < rows ? shuffled_row(row) : row;
            for (int32_t column = row < rows ? p.width / block : 0; column < p.scale_columns; ++column)
              scales[scale_offset(p.layout, target, column, p.scale_columns)] = 0;
          }
          if (row >= rows) continue;
          const char* input =
              static_cast<const char*>(p.input) + (batch * p.input_batch_stride + row * p.input_row_stride) * bytes;
          std::fill(x.begin() + p.columns, x.end(), 0.f);
          load(input, x.data(), p.columns);
          if (gated) {
            load(input + p.columns * bytes, y.data(), p.columns);
            detail::gate_row(x.data(), y.data(), p.columns);
            detail::canonical_row(x.data(), p.columns);
            store(x.data(), rounded.data(), p.columns);
            load(rounded.data(), x.data(), p.columns);
          }
          float global_scale = 1.f;
          if (p.global_scale)
            global_scale = p.global_scale[batch * p.global_scale_stride + row * p.global_scale_row_stride];
          if (p.inverse_global_scale) global_scale = 1.f / global_scale;
          quantize_row(p, batch, row, x.data(), y.data(), out_type, format, block, global_scale);
        }
      });
}

}  // namespace fi::cpu
