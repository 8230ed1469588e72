// append_latent_rows on sm_80 and later: a warp quantizes one row, 16 columns a lane.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/page/append_latent_rows.h"

namespace fi {

template <bool kPacked>
FI_DEVICE void append_latent_rows(const AppendLatentRowsParams& p) {
  using Row = __nv_bfloat16;
  constexpr int kCodes = kPacked ? kPackedCodes : kLatentColumns, kLanes = (kPacked ? kPackedGroup : kRowGroup) / 16;
  const int lane = threadIdx.x % 32, column = lane * 16;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  pdl_wait();
  const int64_t slot = row < p.n ? p.slot(row) : -1;
  if (slot < 0) return;
  const Row* from = static_cast<const Row*>(p.rows) + row * p.row_stride;
  const auto to = p.place(slot);
  const Vec<Row, 8> halves[2] = {load<Row, 8>(from + column), load<Row, 8>(from + column + 8)};
  float x[2][8], amax = 0.f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    to_float(halves[h], x[h]);
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[h][i]));
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  if (column < kCodes) {
    const uint32_t exponent = latent_exponent(__float_as_uint(amax));
    const bool is_power = kPacked || p.power_of_two;
    const float scale = is_power ? __uint_as_float(power_of_two_bits(exponent)) : latent_scale(amax);
    Vec<__nv_fp8_e4m3, 16> codes;
#pragma unroll
    for (int i = 0; i < 16; ++i) codes.v[i] = from_float<__nv_fp8_e4m3>(__fdiv_rn(x[i / 8][i % 8], scale));
    store(reinterpret_cast<__nv_fp8_e4m3*>(to.row + column), codes);
    if (lane % kLanes == 0) {
      if constexpr (kPacked)
        to.scales[lane / kLanes] = static_cast<uint8_t>(exponent);
      else
        reinterpret_cast<float*>(to.scales)[lane / kLanes] = scale;
    }
  } else {  // packed: the last four lanes have the 16-bit columns
    Row* rest = reinterpret_cast<Row*>(to.row + kCodes) + (column - kCodes);
    store(rest, halves[0]), store(rest + 8, halves[1]);
    if (lane == 31) to.scales[kPackedCodes / kPackedGroup] = 0;
  }
  if (!kPacked && lane < kRopeColumns / 8)
    store(reinterpret_cast<Row*>(to.row + kCodes + 16) + lane * 8, load<Row, 8>(from + kCodes + lane * 8));
}

}  // namespace fi
