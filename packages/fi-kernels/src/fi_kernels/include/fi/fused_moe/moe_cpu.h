// What the CPU kernels of a mixture of experts share: quantization to e4m3, checks of row tables.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fi/cpu/row_convert.h"
#include "fi/host/op.h"

namespace fi::cpu {

// x as e4m3, with a scale of each 128: max(amax, 1e-10) / 448. NaN does not count, and stays NaN.
inline void quantize_blocks(float* x, void* out, float* scales, int64_t n) {
  for (int64_t b = 0; b < n / 128; ++b) {
    float amax = 1e-10f;
    for (int64_t i = 128 * b; i < 128 * (b + 1); ++i) amax = std::fmax(amax, std::fabs(x[i]));
    scales[b] = amax * (1.f / 448.f);
    const float inverse = 448.f / amax;
    for (int64_t i = 128 * b; i < 128 * (b + 1); ++i) x[i] *= inverse;
  }
  row_storer(kE4M3)(x, out, n);
}

// Raises unless the rows name tokens, or none (-1).
inline void check_rows(const Tensor& rows, int64_t tokens) {
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const int32_t token = rows.data<int32_t>()[i];
    FI_CHECK(token >= -1 && token < tokens, ValueError, "%s must be in -1..%lld; got %d at %lld", rows.name(),
             static_cast<long long>(tokens - 1), token, static_cast<long long>(i));
  }
}

// Raises unless the positions name rows, or none (a negative number).
inline void check_positions(const Tensor& positions, int64_t rows) {
  for (int64_t i = 0; i < positions.numel(); ++i)
    FI_CHECK(positions.data<int32_t>()[i] < rows, ValueError,
             "%s must be below %lld, the number of rows; got %d at %lld", positions.name(),
             static_cast<long long>(rows), positions.data<int32_t>()[i], static_cast<long long>(i));
}

}  // namespace fi::cpu
