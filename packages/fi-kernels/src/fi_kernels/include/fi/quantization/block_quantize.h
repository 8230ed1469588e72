// Parameters of block quantization and the scale arithmetic that the CPU and CUDA kernels share bit by bit.
#pragma once
#include "fi/divisor.h"
#include "fi/quantization/scale_layout.h"

namespace fi {

// Each block of a row becomes values and one scale: value = out * scale (NVFP4: / global_scale). Columns from `columns`
// to `width`, and scales that only pad a swizzled layout, become 0. Strides are in elements of the tensor.
struct BlockQuantizeParams {
  void* out;                  // [batch, rows, width]: e2m1 (two values a byte), e4m3, e5m2 or int8
  void* scales;               // [batch, padded_rows, scale_columns] in `layout`; fp32: by the strides below
  const void* input;          // [batch, rows, columns], gated: [batch, rows, 2 columns]
  const float* global_scale;  // [batch], [rows] or [1], with the strides below; null: 1
  const int32_t* mask;        // [batch], valid rows; null: all. Later rows are not written
  int64_t out_row_stride, out_batch_stride;
  int64_t input_row_stride, input_batch_stride;
  int64_t scale_row_stride, scale_column_stride;  // fp32 scales only
  int32_t global_scale_stride, global_scale_row_stride, inverse_global_scale;
  int32_t batch, rows, padded_rows, columns, width, scale_columns;
  int32_t layout;   // ScaleLayout
  int32_t shuffle;  // 1: rows of out and scales are permuted by shuffled_row
  float eps;
  Divisor chunks;  // of 16 elements, a row of scale_columns whole blocks
};

constexpr int32_t kChunk = 16;  // elements that a thread quantizes together

// The largest finite values.
constexpr float kE2m1Limit = 6.f, kE4m3Limit = 448.f, kE5m2Limit = 57344.f, kInt8Limit = 127.f;

// The row that trtllm-style kernels with an epilogue tile of 128 read as `row`: in each block of 32, row i moves to
// 8 (i % 4) + i / 4.
FI_HOST_DEVICE int32_t shuffled_row(int32_t row) { return (row & ~31) | (row & 3) << 3 | (row >> 2 & 7); }

// The biased exponent of the smallest power of two >= amax / limit, by the bits of two non-negative floats; at most
// 254, at least 0, which stands for 2^-127. The carry of the addition compares the mantissas, so there is no rounding.
FI_HOST_DEVICE uint32_t ceil_exponent(uint32_t amax, uint32_t limit) {
  if (amax >= 0x7f800000u) return 254;
  const int32_t exponent =
      static_cast<int32_t>((amax + 0x7fffffu - (limit & 0x7fffffu)) >> 23) - static_cast<int32_t>((limit >> 23) - 127);
  return exponent > 0 ? static_cast<uint32_t>(exponent) : 0;
}

// The bits of the float 2^(exponent - 127).
FI_HOST_DEVICE uint32_t power_of_two_bits(uint32_t exponent) { return exponent ? exponent << 23 : 0x00400000u; }

// e4m3 scales: the unrounded scale, and the factor of the values for the rounded scale.
FI_HOST_DEVICE float scaled_amax(float amax, float global_scale) { return global_scale * (amax * (1.f / kE2m1Limit)); }
FI_HOST_DEVICE float inverse_scale(float scale, float global_scale) {
  return scale == 0.f ? 0.f : 1.f / (scale / global_scale);
}

}  // namespace fi
