// What a rank does with a reduced row: stores it, normalizes it, quantizes the norm.
#pragma once
#include "fi/comm/all_reduce.h"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/quantization/block_quantize.h"
#include "fi/quantization/e2m1.cuh"

namespace fi {

template <class T>
struct ReducedRow {
  static constexpr int kVec = 16 / sizeof(T);
  using V = Vec<T, kVec>;

  FI_DEVICE static void to_words(const float (&f)[kVec], uint4& words) {
    V x;
    from_float(f, x);
    memcpy(&words, &x, sizeof x);
  }
  FI_DEVICE static void to_floats(const uint4& words, float (&f)[kVec]) {
    V x;
    memcpy(&x, &words, sizeof x);
    to_float(x, f);
  }
  FI_DEVICE static void add(const uint4& words, float (&sum)[kVec]) {
    float f[kVec];
    to_floats(words, f);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] += f[i];
  }

  // s: the vectors of this thread of row `row`, rounded to T; w: its weights. All threads of the CTA call it.
  template <int kOutput, int kVecs>
  FI_DEVICE static void store(const AllReduceParams& p, int row, const uint4 (&s)[kVecs], const uint4 (&w)[kVecs],
                              float* warp_sums) {
    const int64_t first = static_cast<int64_t>(row) * p.vectors;
    const int64_t left = p.total - first;
    const int vectors = left < p.vectors ? static_cast<int>(left) : p.vectors;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x);
      if (i < vectors && p.out) store_global(static_cast<uint4*>(p.out) + first + i, s[k]);
    }
    if constexpr (kOutput != kReduceSum) {
      float squares = 0.f;
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int i = static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x);
        if (i < vectors) {
          float f[kVec];
          to_floats(s[k], f);
#pragma unroll
          for (int j = 0; j < kVec; ++j) squares += f[j] * f[j];
        }
      }
      const float inv_rms = rsqrtf(block_sum(squares, warp_sums) * p.inv_d + p.eps);
      const float scale = kOutput == kReduceNorm || !p.scale ? 1.f : *p.scale;
      constexpr bool by_row = kOutput == kReduceRowE4m3;
      uint4 held[by_row ? kVecs : 1];  // the norm, until the scale of the row is known
      float row_amax = 0.f;
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int i = static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x);
        float y[kVec];
        uint4 normed = make_uint4(0, 0, 0, 0);
        if (i < vectors) {
          float f[kVec];
          to_floats(s[k], f);
          to_floats(kVecs < 4 ? w[k] : static_cast<const uint4*>(p.weight)[i], y);
#pragma unroll
          for (int j = 0; j < kVec; ++j) y[j] = (y[j] + p.weight_bias) * (f[j] * inv_rms);
          to_words(y, normed);
          if (p.norm_out) store_global(static_cast<uint4*>(p.norm_out) + first + i, normed);
        }
        to_floats(normed, y);
        if constexpr (kOutput == kReduceE4m3) {
          if (i < vectors) store_e4m3(p, first + i, y, 1.f / scale);
        } else if constexpr (kOutput == kReduceE2m1) {
          store_e2m1(p, row, i, i < vectors, first, y, normed, scale);
        } else if constexpr (kOutput == kReduceGroupE4m3) {
          store_group(p, row, i, i < vectors, first, y);
        } else if constexpr (by_row) {
          held[k] = normed;
          row_amax = fmaxf(row_amax, magnitude(y));
        }
      }
      if constexpr (by_row) {
        __syncthreads();  // warp_sums is free
        const float amax = block_max(row_amax, warp_sums), row_scale = row_e4m3_scale(amax);
        if (threadIdx.x == 0) static_cast<float*>(p.scale_out)[p.first_row + row] = row_scale;
#pragma unroll
        for (int k = 0; k < kVecs; ++k) {
          const int i = static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x);
          float y[kVec];
          to_floats(held[k], y);
          if (i < vectors) store_e4m3(p, first + i, y, 1.f / row_scale);
        }
      }
      __syncthreads();  // warp_sums is free again
    }
  }

  FI_DEVICE static void store_e4m3(const AllReduceParams& p, int64_t vector, float (&y)[kVec], float factor) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) y[j] *= factor;
    Vec<__nv_fp8_e4m3, kVec> q;
    from_float(y, q);
    fi::store(static_cast<__nv_fp8_e4m3*>(p.quant_out) + vector * kVec, q);
  }
  FI_DEVICE static float magnitude(const float (&y)[kVec]) {
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < kVec; ++j) amax = fmaxf(amax, fabsf(y[j]));
    return amax;
  }
  // Neighbouring lanes hold a group, as block_quantize with a ue8m0 scale; four scales are a word.
  FI_DEVICE static void store_group(const AllReduceParams& p, int row, int i, bool inside, int64_t first,
                                    float (&y)[kVec]) {
    const float amax = warp_max(magnitude(y), p.group / kVec);  // outside of branches: shuffles need whole warps
    if (!inside) return;
    const uint32_t exponent = ceil_exponent(__float_as_uint(amax), __float_as_uint(kE4m3Limit));
    store_e4m3(p, first + i, y, __uint_as_float(power_of_two_bits(254 - exponent)));
    const int group = i * kVec / p.group;
    if (i * kVec % p.group == 0)
      static_cast<uint8_t*>(p.scale_out)[group_scale_offset(p.first_row + row, group, p.scale_columns)] =
          static_cast<uint8_t>(exponent);
  }
  // Two neighbouring lanes hold a block of 16 elements, as block_quantize with an e4m3 scale.
  FI_DEVICE static void store_e2m1(const AllReduceParams& p, int row, int i, bool inside, int64_t first,
                                   float (&y)[kVec], const uint4& words, float global_scale) {
    if constexpr (kVec == 8) {
      const float amax = warp_max(magnitude(y), 2);
      if (!inside) return;
      const __nv_fp8_e4m3 code(scaled_amax(amax, global_scale));
      const float factor = inverse_scale(to_float(code), global_scale);
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] *= factor;
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
      static_cast<uint32_t*>(p.quant_out)[first + i] = e2m1_magnitudes(y) | e2m1_signs(pairs);
      if (i % 2 == 0)
        static_cast<uint8_t*>(p.scale_out)[scale_offset(p.layout, p.first_row + row, i / 2, p.scale_columns)] =
            code.__x;
    }
  }
};

}  // namespace fi
