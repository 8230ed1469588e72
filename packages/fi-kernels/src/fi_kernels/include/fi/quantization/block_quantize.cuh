// Block quantization on sm_80 and later: a thread quantizes 16 columns of four rows; four lanes exchange their scales.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/quantization/block_quantize.h"
#include "fi/quantization/e2m1.cuh"

namespace fi {

template <class Out>
constexpr float kLimit = kE2m1Limit;
template <>
constexpr float kLimit<__nv_fp8_e4m3> = kE4m3Limit;
template <>
constexpr float kLimit<__nv_fp8_e5m2> = kE5m2Limit;
template <>
constexpr float kLimit<int8_t> = kInt8Limit;

// 16 neighbouring elements of a row.
template <class T>
struct Chunk {
  static constexpr int kVec = 16 / sizeof(T), kVecs = kChunk / kVec;
  Vec<T, kVec> v[kVecs];

  FI_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) memset(&v[i], 0, sizeof v[i]);
  }
  template <bool kAligned>
  FI_DEVICE void load_from(const T* p) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if constexpr (kAligned) {
        v[i] = load<T, kVec>(p + i * kVec);
      } else {
#pragma unroll
        for (int k = 0; k < kVec; ++k) v[i].v[k] = p[i * kVec + k];
      }
    }
  }
  // Elements 8 h to 8 h + 7.
  FI_DEVICE void half(int h, float (&f)[8]) const {
    if constexpr (kVec == 8) {
      to_float(v[h], f);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) f[i] = to_float(v[(8 * h + i) / kVec].v[(8 * h + i) % kVec]);
    }
  }
  // The signs of these elements, at the places of the signs of their e2m1 codes.
  FI_DEVICE uint32_t signs(int h) const {
    if constexpr (sizeof(T) == 2) return e2m1_signs(reinterpret_cast<const uint32_t (&)[4]>(v[h]));
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) found |= sign_bit(v[(8 * h + i) / kVec].v[(8 * h + i) % kVec]) << (4 * i + 3);
    return found;
  }
  // The largest magnitude; NaN is ignored.
  FI_DEVICE float magnitude() const {
    if constexpr (sizeof(T) == 2) {
      using Pair = decltype(pair_of(T{}));
      Pair largest{};
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        Pair x;
        memcpy(&x, &v[i / 4].v[i % 4 * 2], sizeof x);
        largest = __hmax2(largest, __habs2(x));
      }
      return fmaxf(__low2float(largest), __high2float(largest));
    } else {
      float largest = 0.f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float f[8];
        half(h, f);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(f[i]));
      }
      return largest;
    }
  }

 private:
  static __device__ __half2 pair_of(__half);
  static __device__ __nv_bfloat162 pair_of(__nv_bfloat16);
};

// silu(gate) * up, rounded to T.
template <class T>
FI_DEVICE void gate_chunk(Chunk<T>& gate, const Chunk<T>& up) {
#pragma unroll
  for (int i = 0; i < Chunk<T>::kVecs; ++i) {
    float x[Chunk<T>::kVec], y[Chunk<T>::kVec];
    to_float(gate.v[i], x);
    to_float(up.v[i], y);
#pragma unroll
    for (int k = 0; k < Chunk<T>::kVec; ++k) y[k] *= CudaMath::scaled_sigmoid(x[k], x[k]);
    from_float(y, gate.v[i]);
  }
}

// The scale of a block as it is stored (a byte, or the bits of a float), and the factor of its values.
struct BlockScale {
  uint32_t bits;
  float factor;
};

template <ScaleFormat kFormat, class Out>
FI_DEVICE BlockScale block_scale(float amax, float global_scale, float eps, const float* factors) {
  const uint32_t limit = __float_as_uint(kLimit<Out>);
  if constexpr (kFormat == kE4m3Scale) {
    const uint32_t code = __nv_fp8_e4m3(scaled_amax(amax, global_scale)).__x;
    return {code, factors[code & 0x7f]};
  } else if constexpr (kFormat == kUe8m0Scale) {
    const uint32_t exponent = ceil_exponent(__float_as_uint(amax), limit);
    return {exponent, __uint_as_float(power_of_two_bits(254 - exponent))};
  } else if constexpr (kFormat == kFloatScale) {
    const float scale = fmaxf(amax, eps) / kLimit<Out>;
    return {__float_as_uint(scale), scale == 0.f ? 0.f : 1.f / scale};
  } else {
    const uint32_t exponent = ceil_exponent(__float_as_uint(fmaxf(amax, eps)), limit);
    return {power_of_two_bits(exponent), __uint_as_float(power_of_two_bits(254 - exponent))};
  }
}

// The scale of NVFP4 where each row has a global scale, so that there is no table of factors.
FI_DEVICE BlockScale row_scale(float amax, float global_scale) {
  const __nv_fp8_e4m3 scale(scaled_amax(amax, global_scale));
  return {scale.__x, inverse_scale(to_float(scale), global_scale)};
}

// x = x / scale, rounded as by a division: the quotient by the reciprocal, corrected by its remainder (Markstein,
// "IA-64 and Elementary Functions", 2000), where neither can overflow or lose bits. The remainder has the sign with
// which -0 stays -0.
template <ScaleFormat kFormat>
FI_DEVICE void divide_by_scale(float (&x)[8], const BlockScale& s) {
  const float scale = __uint_as_float(s.bits);
  if (kFormat != kFloatScale || scale == 0.f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= s.factor;
  } else if (scale > 1e-18f && scale < 1e30f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float y = x[i] * s.factor;
      x[i] = fmaf(-fmaf(y, scale, -x[i]), s.factor, y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] /= scale;
  }
}

// The bytes of 16 quantized elements.
template <class Out>
struct Quantized {
  static constexpr int kWords = sizeof(Out) == 1 && kLimit<Out> == kE2m1Limit ? 2 : 4;
  uint32_t words[kWords];

  template <bool kAligned>
  FI_DEVICE void store_to(uint8_t* p) const {
    if constexpr (!kAligned) {
#pragma unroll
      for (int i = 0; i < 4 * kWords; ++i) p[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
    } else if constexpr (kWords == 2) {
      store_global(p, make_uint2(words[0], words[1]));
    } else {
      store_global(p, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
};

template <class Out, ScaleFormat kFormat, class T>
FI_DEVICE Quantized<Out> quantize(const Chunk<T>& x, const BlockScale& scale) {
  Quantized<Out> out;
  constexpr int words = Quantized<Out>::kWords / 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float y[8];
    x.half(h, y);
    divide_by_scale<kFormat>(y, scale);
    if constexpr (words == 1) {
      out.words[h] = e2m1_magnitudes(y) | x.signs(h);
    } else if constexpr (kLimit<Out> == kInt8Limit) {
      Vec<int8_t, 8> bytes;
#pragma unroll
      for (int i = 0; i < 8; ++i) bytes.v[i] = static_cast<int8_t>(max(-128, min(127, __float2int_rn(y[i]))));
      memcpy(&out.words[words * h], &bytes, sizeof bytes);
    } else {
      Vec<Out, 8> bytes;
      from_float(y, bytes);
      memcpy(&out.words[words * h], &bytes, sizeof bytes);
    }
  }
  return out;
}

// Stores scales of one byte. `codes` holds those of rows row, row + 32, row + 64, row + 96 in one column. The lanes of
// four columns transpose their bytes, so that each has the four columns of one row: a word in every layout, and in the
// 128x4 layout 16 consecutive bytes by four lanes.
template <int kLanes>
FI_DEVICE void store_scale_bytes(const BlockQuantizeParams& p, int32_t row, int32_t padded_rows, int32_t chunk,
                                 uint32_t codes) {
  const int lane = chunk / kLanes % 4;
  uint32_t other = __shfl_xor_sync(0xffffffffu, codes, 2 * kLanes);
  codes = __byte_perm(codes, other, lane < 2 ? 0x5410 : 0x3276);
  other = __shfl_xor_sync(0xffffffffu, codes, kLanes);
  codes = __byte_perm(codes, other, lane % 2 == 0 ? 0x6240 : 0x3715);
  row += 32 * lane;
  if (chunk % kLanes || row >= padded_rows) return;
  const int32_t column = chunk / kLanes & ~3;
  uint8_t* out = static_cast<uint8_t*>(p.scales) + static_cast<int64_t>(blockIdx.y) * p.padded_rows * p.scale_columns +
                 scale_offset(p.layout, p.shuffle ? shuffled_row(row) : row, column, p.scale_columns);
  if (p.scale_columns % 4 == 0) {
    *reinterpret_cast<uint32_t*>(out) = codes;
  } else {
    for (int i = 0; i < 4 && column + i < p.scale_columns; ++i) out[i] = static_cast<uint8_t>(codes >> (8 * i));
  }
}

// A thread holds a chunk of four rows of a tile of 128, so each thread has 64 to 128 bytes in flight.
template <class T, class Out, int kBlock, ScaleFormat kFormat, bool kGated, bool kAligned>
FI_DEVICE void block_quantize(const BlockQuantizeParams& p) {
  constexpr int lanes = kBlock / kChunk, rows_at_once = kGated || sizeof(T) == 4 ? 2 : 4;
  constexpr bool byte_scales = kFormat == kE4m3Scale || kFormat == kUe8m0Scale;
  __shared__ float factors[kFormat == kE4m3Scale ? 128 : 1];  // of the values, by the code of the scale
  const uint32_t first = blockIdx.x * blockDim.x, group = divide(first + threadIdx.x, p.chunks);
  const int32_t chunk = static_cast<int32_t>(first + threadIdx.x - group * p.chunks.value), column = chunk * kChunk;
  const int32_t row = static_cast<int32_t>(group / 32 * 128 + group % 32);
  pdl_wait();
  int32_t rows = p.rows, padded_rows = p.padded_rows;
  if (p.mask) {
    rows = max(0, min(rows, p.mask[blockIdx.y]));
    padded_rows = min(padded_rows, (rows + 127) / 128 * 128);
    if (static_cast<int32_t>(divide(first, p.chunks) / 32 * 128) >= padded_rows) return;  // the whole CTA
  }
  const T* input = static_cast<const T*>(p.input) + blockIdx.y * p.input_batch_stride + column;
  uint8_t* out = static_cast<uint8_t*>(p.out) + blockIdx.y * p.out_batch_stride +
                 (Quantized<Out>::kWords == 2 ? column / 2 : column);
  float global_scale = 1.f;
  uint32_t codes = 0;
#pragma unroll
  for (int first_row = 0; first_row < 4; first_row += rows_at_once) {
    Chunk<T> x[rows_at_once], up[kGated ? rows_at_once : 1];
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int32_t r = row + 32 * (first_row + j);
      x[j].clear();
      if constexpr (kGated) up[j].clear();
      if (r < rows && column < p.columns) {
        x[j].template load_from<kAligned>(input + r * p.input_row_stride);
        if constexpr (kGated) up[j].template load_from<kAligned>(input + r * p.input_row_stride + p.columns);
      }
    }
    if (kFormat == kE4m3Scale && first_row == 0) {
      if (p.global_scale) global_scale = p.global_scale[blockIdx.y * p.global_scale_stride];
      if (p.inverse_global_scale) global_scale = 1.f / global_scale;
      for (int i = threadIdx.x; i < 128; i += blockDim.x) {
        __nv_fp8_e4m3 scale;
        scale.__x = static_cast<__nv_fp8_storage_t>(i);
        factors[i] = inverse_scale(to_float(scale), global_scale);
      }
      __syncthreads();
    }
    if (first_row + rows_at_once == 4) pdl_launch_dependents();
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int32_t r = row + 32 * (first_row + j);
      if constexpr (kGated) gate_chunk(x[j], up[j]);
      const float amax = warp_max(x[j].magnitude(), lanes);
      BlockScale scale;
      if (kFormat == kE4m3Scale && p.global_scale_row_stride) {
        const float of_row = p.global_scale[min(r, p.rows - 1)];
        scale = row_scale(amax, p.inverse_global_scale ? 1.f / of_row : of_row);
      } else {
        scale = block_scale<kFormat, Out>(amax, global_scale, p.eps, factors);
      }
      if constexpr (byte_scales) codes |= scale.bits << (8 * (first_row + j));
      if (r >= rows || column >= p.width) continue;
      const Quantized<Out> quantized = quantize<Out, kFormat>(x[j], scale);
      quantized.template store_to<kAligned>(out + (p.shuffle ? shuffled_row(r) : r) * p.out_row_stride);
      if (!byte_scales && chunk % lanes == 0)
        static_cast<float*>(p.scales)[r * p.scale_row_stride + chunk / lanes * p.scale_column_stride] =
            __uint_as_float(scale.bits);
    }
  }
  if constexpr (byte_scales) store_scale_bytes<lanes>(p, row, padded_rows, chunk, codes);
}

}  // namespace fi
