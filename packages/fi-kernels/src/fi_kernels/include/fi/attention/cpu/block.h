// Dense float blocks for attention on the CPU: the softmax step over a transposed block of scores, and rows of it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "fi/attention/rotary.h"
#include "fi/attention/softmax.h"
#include "fi/cpu/math.h"
#include "fi/cpu/products.h"
#include "fi/cpu/target.h"

namespace fi::cpu {

// One step of the online softmax for rows [begin, end) of scores s[key][row]; both are multiples of 16.
// Replaces s by exp2(s - row_max), updates row_max and row_sum, and sets the rescale factor of earlier output.
template <int kLanes>
FI_CLONES void softmax_step(float* s, int64_t pitch, int64_t keys, int64_t begin, int64_t end, float* row_max,
                            float* row_sum, float* rescale) {
  for (int64_t r = begin; r < end; r += kLanes) {
    float new_max[kLanes], reference[kLanes], sum[kLanes] = {};
    for (int l = 0; l < kLanes; ++l) new_max[l] = row_max[r + l];
    for (int64_t j = 0; j < keys; ++j) {
      const float* row = s + j * pitch + r;
#pragma omp simd
      for (int l = 0; l < kLanes; ++l) new_max[l] = select(row[l] > new_max[l], row[l], new_max[l]);
    }
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) {
      reference[l] = select(new_max[l] == kMinusInf, 0.f, new_max[l]);
      rescale[r + l] = CpuMath::exp2(row_max[r + l] - reference[l]);
    }
    for (int64_t j = 0; j < keys; ++j) {
      float* row = s + j * pitch + r;
#pragma omp simd
      for (int l = 0; l < kLanes; ++l) {
        row[l] = CpuMath::exp2(row[l] - reference[l]);
        sum[l] += row[l];
      }
    }
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) {
      row_sum[r + l] = row_sum[r + l] * rescale[r + l] + sum[l];
      row_max[r + l] = new_max[l];
    }
  }
}

// The same step for one row of scores s[key]; keys is a multiple of 16. Returns the rescale factor of earlier output.
template <int kLanes>
FI_CLONES float softmax_row(float* s, int64_t keys, float* row_max, float* row_sum) {
  float new_max[kLanes], sum[kLanes] = {};
  for (int l = 0; l < kLanes; ++l) new_max[l] = *row_max;
  for (int64_t j = 0; j < keys; j += kLanes)
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) new_max[l] = select(s[j + l] > new_max[l], s[j + l], new_max[l]);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) new_max[l] = select(new_max[l + half] > new_max[l], new_max[l + half], new_max[l]);
  const float reference = softmax_reference(new_max[0]);
  for (int64_t j = 0; j < keys; j += kLanes)
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) {
      s[j + l] = CpuMath::exp2(s[j + l] - reference);
      sum[l] += s[j + l];
    }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  const float rescale = CpuMath::exp2(*row_max - reference);
  *row_sum = *row_sum * rescale + sum[0];
  *row_max = new_max[0];
  return rescale;
}

template <int kLanes>
FI_CLONES void soft_cap(float* s, float cap, int64_t n) {
#pragma omp simd simdlen(kLanes)
  for (int64_t i = 0; i < n; ++i) s[i] = cap * CpuMath::tanh(s[i]);
}

// ALiBi on the scores of one key, whose rows have their own slopes and positions in the call.
template <int kLanes>
FI_CLONES void add_slopes(float* s, const float* slope, const float* position, int64_t rows, float key) {
#pragma omp simd simdlen(kLanes)
  for (int64_t r = 0; r < rows; ++r) s[r] += slope[r] * (key - position[r]);
}

// ALiBi on the scores of one row, against keys at distances first, first + 1, ...
template <int kLanes>
FI_CLONES void add_slope(float* s, float slope, float first, int64_t keys) {
#pragma omp simd simdlen(kLanes)
  for (int64_t j = 0; j < keys; ++j) s[j] += slope * (first + static_cast<float>(j));
}

template <int kLanes>
FI_CLONES void multiply_row(float* x, float factor, int64_t n) {
#pragma omp simd simdlen(kLanes)
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

template <int kLanes>
FI_CLONES void add_scaled(float* sum, const float* x, float factor, int64_t n) {
#pragma omp simd simdlen(kLanes)
  for (int64_t i = 0; i < n; ++i) sum[i] += factor * x[i];
}

// Rotates one row of 2 * half elements; steps are angles a position, as in Rotary.
template <int kLanes>
FI_CLONES void rotate_row(float* x, const uint64_t* steps, int64_t half, int64_t position) {
#pragma omp simd simdlen(kLanes)
  for (int64_t k = 0; k < half; ++k) {
    float cosine, sine;
    cos_sin_of_phase(static_cast<uint32_t>((static_cast<uint64_t>(position) * steps[k]) >> 32), &cosine, &sine);
    const float a = x[k], b = x[half + k];
    x[k] = a * cosine - b * sine;
    x[half + k] = b * cosine + a * sine;
  }
}

}  // namespace fi::cpu
