// Loads rows of tokens, gathered by index, as the K-major operand of wgmma: through registers, which quantise 16-bit
// rows to e4m3 with a scale for each 128 elements on the way.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/ptx/mbarrier_sm90.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/e4m3_block.h"

namespace fi {

// How rows become the operand of wgmma.
enum class TokenForm {
  kSame,       // as they are, 128 bytes of a row at a time
  kQuantized,  // 16 bits to e4m3, 128 elements at a time with a scale
  kInParts,    // 16 bits to the sum of e4m3 parts, 256 elements at a time with a scale, for 4-bit weights
};

// The e4m3 parts of a 16-bit float. An e4m3 holds 4 of its 8 (bf16) or 11 bits, and what is left, times kTokenPartStep,
// fits the next part. Below 2^-20 of the largest element of a block the last bits are lost.
template <class T>
constexpr int kTokenParts = kIsSame<T, __half> ? 3 : 2;
constexpr float kTokenPartStep = 32.f;

// A warp's view of the rows of one tile. In: elements in memory. kTokens: rows of a tile, of which `count` exist; the
// others stay as they are, and so does their part of the products. kPieces: of a row, in a stage.
template <class In, TokenForm kForm, int kTokens, int kPieces>
struct TokenRows {
  static constexpr bool kQuantises = kForm == TokenForm::kQuantized, kSplits = kForm == TokenForm::kInParts;
  static constexpr int kLine = kSwizzleLineBytes, kVec = 16 / sizeof(In);
  static constexpr int kPieceElements = kForm == TokenForm::kSame ? kLine / sizeof(In) : kSplits ? 256 : 128;
  static constexpr int kPieceBytes = kSplits ? 2 * kTokenParts<In> * kLine : kLine;  // of a token
  static constexpr int kLanes = kPieceElements / kVec, kPerLoad = 32 / kLanes;       // lanes of a row; rows of a load
  static constexpr int kIndices = (kTokens + 31) / 32, kLoads = kTokens / kPerLoad;
  static constexpr int kBatch = kLoads * kPieces < 8 ? kLoads : 8 / kPieces;  // loads of a piece in flight
  static_assert(sizeof(In) == 2 || kForm == TokenForm::kSame, "16-bit rows are converted");

  const In* in;  // at this lane's columns
  int64_t stride;
  int k;  // columns that are left from this lane's on
  int count, rows[kIndices];

  FI_DEVICE TokenRows(const void* from, int64_t row_stride, int columns)
      : in(static_cast<const In*>(from) + threadIdx.x % kLanes * kVec),
        stride(row_stride),
        k(columns - static_cast<int>(threadIdx.x) % kLanes * kVec),
        count(0) {}

  FI_DEVICE void locate(const int32_t* source, int first, int rows_of_tile) {
    count = rows_of_tile;
#pragma unroll
    for (int i = 0; i < kIndices; ++i) {
      const int row = first + min(i * 32 + static_cast<int>(threadIdx.x) % 32, count - 1);
      rows[i] = source ? source[row] : row;
    }
  }

  // Loads the pieces from `piece` on to to[0], to[1] ..; before the first store it calls ready(). scale[i][token]
  // becomes the scale of quantised pieces.
  template <class Ready>
  FI_DEVICE void load(char (*to)[kTokens * kPieceBytes], float (*scale)[kTokens], int piece, Ready&& ready) const {
    const int loads = (count + kPerLoad - 1) / kPerLoad;
#pragma unroll 1
    for (int begin = 0; begin < loads; begin += kBatch) {
      uint4 x[kBatch][kPieces];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int token = token_of(begin + i), row = row_of(token);
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          const int column = (piece + j) * kPieceElements;
          x[i][j] = {0, 0, 0, 0};
          if (token < count && column < k) x[i][j] = *reinterpret_cast<const uint4*>(in + row * stride + column);
        }
      }
      if (begin == 0) ready();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i >= loads) break;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) put(to[j], scale[j], token_of(begin + i), x[i][j]);
      }
    }
  }

 private:
  FI_DEVICE static int token_of(int load) { return load * kPerLoad + static_cast<int>(threadIdx.x) % 32 / kLanes; }
  FI_DEVICE int row_of(int token) const {
    int row = __shfl_sync(0xffffffffu, rows[0], token % 32);
    if constexpr (kIndices > 1) {
      const int upper = __shfl_sync(0xffffffffu, rows[1], token % 32);
      if (token >= 32) row = upper;
    }
    return row;
  }
  FI_DEVICE void put(char* to, float* scale, int token, const uint4& x) const {
    const int lane = threadIdx.x % kLanes;
    if constexpr (kQuantises) {
      float f[8], most = kMinBlockMax;
      to_float(reinterpret_cast<const Vec<In, 8>&>(x), f);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(f[i]));
      most = warp_max(most, kLanes);
      const float inverse = kE4m3Max / most;
      const uint2 y = {e4m3_quad(f[0] * inverse, f[1] * inverse, f[2] * inverse, f[3] * inverse),
                       e4m3_quad(f[4] * inverse, f[5] * inverse, f[6] * inverse, f[7] * inverse)};
      if (token >= count) return;
      *reinterpret_cast<uint2*>(to + swizzled_offset(token, lane / 2) + lane % 2 * 8) = y;
      if (lane == 0) scale[token] = most / kE4m3Max;
    } else if constexpr (kSplits) {
      put_parts(to, scale, token, x);
    } else {
      if (token < count) *reinterpret_cast<uint4*>(to + swizzled_offset(token, lane)) = x;
    }
  }
  // A warp has 256 elements of a token. The even ones of each 32 come first, then the odd ones: the order in which
  // Fp4Mainloop has weights.
  FI_DEVICE void put_parts(char* to, float* scale, int token, const uint4& x) const {
    const int lane = threadIdx.x % 32, group = lane % 16 / 4;
    float f[8], most = 0.f;
    to_float(reinterpret_cast<const Vec<In, 8>&>(x), f);
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(f[i]));
    // The largest becomes 128 to 256. Infinity makes the row NaN.
    const unsigned exponent = max(__reduce_max_sync(0xffffffffu, __float_as_uint(most)) >> 23, 8u);
    const float factor = __uint_as_float(exponent == 255 ? 0x7fc00000u : (261 - exponent) << 23);
    if (token >= count) return;
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = i % 2 * 4 + i / 2;
      const __half2 pair = __floats2half2_rn(f[first] * factor, f[first + 2] * factor);
      pairs[i] = reinterpret_cast<const unsigned&>(pair);
    }
    char* of_line = to + lane / 16 * (kTokenParts<In> * kTokens * kLine) + lane % 4 * 4;
#pragma unroll
    for (int part = 0; part < kTokenParts<In>; ++part) {
      unsigned codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[i] = e4m3_pair(pairs[i]);
        if (part + 1 < kTokenParts<In>) pairs[i] = remainder(pairs[i], halves(codes[i], __nv_fp8_e4m3()));
      }
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
        *reinterpret_cast<unsigned*>(of_line + swizzled_offset(part * kTokens + token, group * 2 + odd)) =
            __byte_perm(codes[odd * 2], codes[odd * 2 + 1], 0x5410);
    }
    if (lane == 0) scale[token] = exponent == 255 ? factor : __uint_as_float((exponent - 1) << 23);  // 2^6 of weights
  }
  FI_DEVICE static unsigned remainder(unsigned pair, unsigned part) {
    const __half2 y = __hmul2(__hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(part)),
                              __float2half2_rn(kTokenPartStep));
    return reinterpret_cast<const unsigned&>(y);
  }
};

}  // namespace fi
