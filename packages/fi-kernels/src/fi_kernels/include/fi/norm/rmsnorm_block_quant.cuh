// Residual-add RMSNorm with a second, e4m3 output scaled by blocks of 128, on sm_80 and later.
#pragma once
#include "fi/norm/rmsnorm.cuh"
#include "fi/norm/rmsnorm_block_quant.h"

namespace fi {

// Stores a row's norm and quantises what was stored; the 16 lanes next to each other that hold a block share its
// maximum.
template <class T, int kCount>
FI_DEVICE void store_quantized(const RmsnormBlockQuantParams& p, const RmsnormRow<T, 8, kCount, true>& row,
                               const Deal<8>& deal, float r, const Vec<T, 8> (&w)[kCount]) {
  T* normed = row.template out<T>(p.norm);
  auto* out = static_cast<__nv_fp8_e4m3*>(p.out) + row.row * p.quant_row;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    float y[8];
    float maximum = 0.f;
    if (deal.has(k)) {
      Vec<T, 8> rounded;
      row.normed_at(p.norm, k, r, w[k], y);
      from_float(y, rounded);
      store(normed + deal.at(k), rounded);
      to_float(rounded, y);
#pragma unroll
      for (int i = 0; i < 8; ++i) maximum = fmaxf(maximum, fabsf(y[i]));
    }
    maximum = fmaxf(warp_max(maximum, kQuantBlock / 8), kSmallestMaximum);  // of whole warps, as shuffles must be
    if (deal.has(k)) {
      const int block = deal.at(k) / kQuantBlock;
      if (deal.at(k) % kQuantBlock == 0) p.block_scale[block * p.scale_pitch + row.row] = maximum / kQuantMax;
      const float factor = kQuantMax / maximum;
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= factor;
      Vec<__nv_fp8_e4m3, 8> quantized;
      from_float(y, quantized);
      store(out + deal.at(k), quantized);
    }
  }
}

// One block a row: 8 * kCount * blockDim.x >= d.
template <class T, int kCount>
FI_DEVICE void rmsnorm_block_quant_block(const RmsnormBlockQuantParams& p) {
  __shared__ float partial[32];
  const Deal<8> deal{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), p.norm.d};
  RmsnormRow<T, 8, kCount, true> row;
  Vec<T, 8> w[kCount];
  row.locate(p.norm, blockIdx.x);
  pdl_wait();
  row.load(p.norm, deal);
  load_row(static_cast<const T*>(p.norm.weight), deal, w);
  const float sum = row.squares(deal);
  row.store_residual(p.norm, deal);
  row.forget();
  pdl_launch_dependents();
  store_quantized(p, row, deal, inverse_rms(block_sum(sum, partial), p.norm), w);
}

// Any d: one block a row, which is read twice, the second time from L1 or L2.
template <class T>
FI_DEVICE void rmsnorm_block_quant_loop(const RmsnormBlockQuantParams& p) {
  __shared__ float partial[32];
  RmsnormRow<T, 8, 1, true> row;
  row.locate(p.norm, blockIdx.x);
  pdl_wait();
  float sum = 0.f;
  for (int i = threadIdx.x; i * 8 < p.norm.d; i += blockDim.x) {
    const Deal<8> deal{i, 0, p.norm.d};
    row.load(p.norm, deal);
    sum += row.squares(deal);
  }
  const float r = inverse_rms(block_sum(sum, partial), p.norm);
  pdl_launch_dependents();
  for (int first = 0; first * 8 < p.norm.d; first += blockDim.x) {  // every thread takes every turn: see the shuffles
    const Deal<8> deal{first + static_cast<int>(threadIdx.x), 0, p.norm.d};
    Vec<T, 8> w[1];
    row.load(p.norm, deal);
    load_row(static_cast<const T*>(p.norm.weight), deal, w);
    row.store_residual(p.norm, deal);
    store_quantized(p, row, deal, r, w);
  }
}

}  // namespace fi
