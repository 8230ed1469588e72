// Queries in bf16 for products with keys that are half.
#pragma once
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/mbarrier_sm90.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

// Makes bf16 queries half, exactly but for elements below 2^-29 of the largest of their row: multiplies a row by the
// power of two that brings its largest element to [2^14, 2^15), and divides the scales of this thread's rows by it.
// Two threads convert a row.
// kRows: of the tile in shared memory, [kDimQK / 64][kRows][64] in the 128-byte swizzle.
template <int kDimQK, int kRows>
struct HalfQueries {
  FI_DEVICE static void convert(__half* q, int group, float (&scales)[2]) {
    constexpr int kPieces = kDimQK / 16;
    const int thread = threadIdx.x % 128, row = group * 64 + thread / 2, first = thread % 2 * kPieces;
    const auto piece = [&](int i) -> uint4& {
      return *reinterpret_cast<uint4*>(reinterpret_cast<char*>(q) +
                                       SwizzledTile<__half, kRows>::offset(row, (first + i) * 8));
    };
    unsigned most = 0;  // of two columns
#pragma unroll 4
    for (int i = 0; i < kPieces; ++i) {
      const uint4 x = piece(i);
      most = max_magnitudes(max_magnitudes(most, x.x, x.y), x.z, x.w);
    }
    most = max(most >> 16, most & 0xffff);
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 1)) >> 7;       // the biased exponent
    const unsigned biased = most == 255 ? 127 : min(268 - most, 253u);  // of the factor
    const float factor = __uint_as_float(biased << 23), inverse = __uint_as_float((254 - biased) << 23);
#pragma unroll 4
    for (int i = 0; i < kPieces; ++i) {
      uint4& x = piece(i);
      x = {scaled_half(x.x, factor), scaled_half(x.y, factor), scaled_half(x.z, factor), scaled_half(x.w, factor)};
    }
    fence_async_shared();  // order: writer: wgmma reads the rows behind the barrier
    warpgroup_sync(1 + group);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = scales[h] * __shfl_sync(0xffffffffu, inverse, 2 * (threadIdx.x % 32 / 4 + 8 * h));
      scales[h] = scale == 0.f ? 0x1p-126f : scale;  // so that a masked score remains -inf
    }
  }

 private:
  // The largest magnitudes of the lower and of the upper halves.
  FI_DEVICE static unsigned max_magnitudes(unsigned a, unsigned b, unsigned c) {
    return __vmaxu2(a, __vmaxu2(b & 0x7fff7fffu, c & 0x7fff7fffu));
  }
  FI_DEVICE static unsigned scaled_half(unsigned pair, float factor) {
    return pack_pair(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor, __half());
  }
};

}  // namespace fi
