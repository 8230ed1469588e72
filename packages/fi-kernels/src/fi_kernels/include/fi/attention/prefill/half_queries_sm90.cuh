// Queries in bf16 for products with keys that are half.
#pragma once
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/mbarrier_sm90.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

// Makes bf16 queries half, exactly but for elements below 2^-29 of the largest of their row: multiplies a row by the
// power of two that brings its largest element to [2^14, 2^15), and divides the scales of this thread's rows by it.
// A warp converts the 16 rows whose scores it gets; eight lanes have 128 bytes of a row.
// kRows: of the tile in shared memory, [kDimQK / 64][kRows][64] in the 128-byte swizzle.
template <int kDimQK, int kRows>
struct HalfQueries {
  static constexpr int kBlocks = kDimQK / 64;

  FI_DEVICE static void convert(__half* q, int group, float (&scales)[2]) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    char* const first = reinterpret_cast<char*>(q) +
                        SwizzledTile<__half, kRows>::offset(group * 64 + thread / 32 * 16 + lane / 8, lane % 8 * 8);
    // Rows 4 further have the other value of a bit of the swizzle.
    const auto piece = [&](int i, int block) -> uint4& {
      return *reinterpret_cast<uint4*>(first + i * 512 + block * (kRows * 128) + i % 2 * turn(lane));
    };
    uint4 x[4][kBlocks];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) x[i][block] = piece(i, block);
    float inverse[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned most = 0;  // of two columns
#pragma unroll
      for (const uint4& y : x[i]) most = max_magnitudes(max_magnitudes(most, y.x, y.y), y.z, y.w);
      most = max(most >> 16, most & 0xffff);
#pragma unroll
      for (int lanes = 1; lanes < 8; lanes *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
      most >>= 7;                                                         // the biased exponent
      const unsigned biased = most == 255 ? 127 : min(268 - most, 253u);  // of the factor
      const float factor = __uint_as_float(biased << 23);
      inverse[i] = __uint_as_float((254 - biased) << 23);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint4 y = x[i][block];
        piece(i, block) = {scaled_half(y.x, factor), scaled_half(y.y, factor), scaled_half(y.z, factor),
                           scaled_half(y.w, factor)};
      }
    }
    fence_async_shared();  // order: writer: wgmma reads the rows behind the barrier
    warpgroup_sync(1 + group);
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // row lane / 4 + 8 h of the warp is row 4 i + lane / 8 of other lanes
      const float low = __shfl_sync(0xffffffffu, inverse[2 * h], lane / 4 % 4 * 8),
                  high = __shfl_sync(0xffffffffu, inverse[2 * h + 1], lane / 4 % 4 * 8);
      const float scale = scales[h] * (lane < 16 ? low : high);
      scales[h] = scale == 0.f ? 0x1p-126f : scale;  // so that a masked score remains -inf
    }
  }

 private:
  // From chunk c of a row to its place in a row four further.
  FI_DEVICE static int turn(int lane) {
    return swizzled_offset(lane / 8 + 4, lane % 8) - swizzled_offset(lane / 8, lane % 8) - 512;
  }
  // The largest magnitudes of the lower and of the upper halves.
  FI_DEVICE static unsigned max_magnitudes(unsigned a, unsigned b, unsigned c) {
    return __vmaxu2(a, __vmaxu2(b & 0x7fff7fffu, c & 0x7fff7fffu));
  }
  FI_DEVICE static unsigned scaled_half(unsigned pair, float factor) {
    return pack_pair(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor, __half());
  }
};

}  // namespace fi
