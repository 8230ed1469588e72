// Residual-add RMSNorm with a second output, e4m3 scaled per block of 128 elements, on sm_80 and later.
#pragma once
#include "fi/norm/rmsnorm.cuh"
#include "fi/norm/rmsnorm_block_quant.h"

namespace fi {

// Stores the normalized row and quantizes the stored values. 16 neighbouring lanes hold a quantization block; a shuffle
// reduction gives them its maximum.
template <class T, int kNumVecs>
FI_DEVICE void store_quantized(const RmsnormBlockQuantParams& p, const RmsnormRow<T, 8, kNumVecs, true>& row,
                               const ThreadVectors<8>& vectors, float inv_rms, const Vec<T, 8> (&w)[kNumVecs]) {
  T* normed = row.template out<T>(p.norm);
  auto* out = static_cast<__nv_fp8_e4m3*>(p.out) + row.row * p.out_row_stride;
#pragma unroll
  for (int k = 0; k < kNumVecs; ++k) {
    float y[8];
    float maximum = 0.f;
    if (vectors.inside(k)) {
      Vec<T, 8> out_vec;
      row.normalize(p.norm, k, inv_rms, w[k], y);
      from_float(y, out_vec);
      store(normed + vectors.offset(k), out_vec);
      to_float(out_vec, y);
#pragma unroll
      for (int i = 0; i < 8; ++i) maximum = fmaxf(maximum, fabsf(y[i]));
    }
    maximum = fmaxf(warp_max(maximum, kQuantBlock / 8), kMinBlockMax);  // outside the branch: shuffles need whole warps
    if (vectors.inside(k)) {
      const int block = vectors.offset(k) / kQuantBlock;
      if (vectors.offset(k) % kQuantBlock == 0) p.block_scale[block * p.scale_pitch + row.row] = maximum / kE4m3Max;
      const float inv_scale = kE4m3Max / maximum;
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= inv_scale;
      Vec<__nv_fp8_e4m3, 8> quantized;
      from_float(y, quantized);
      store(out + vectors.offset(k), quantized);
    }
  }
}

// One CTA per row, held in registers: 8 * kNumVecs * blockDim.x >= d.
template <class T, int kNumVecs>
FI_DEVICE void rmsnorm_block_quant_cta(const RmsnormBlockQuantParams& p) {
  __shared__ float warp_sums[32];
  const ThreadVectors<8> vectors{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), p.norm.d};
  RmsnormRow<T, 8, kNumVecs, true> row;
  Vec<T, 8> w[kNumVecs];
  row.locate(p.norm, blockIdx.x);
  pdl_wait();
  row.load(p.norm, vectors);
  load_row(static_cast<const T*>(p.norm.weight), vectors, w);
  const float squares = row.partial_squares(vectors);
  row.store_residual(p.norm, vectors);
  row.barrier();
  pdl_launch_dependents();
  store_quantized(p, row, vectors, inverse_rms(block_sum(squares, warp_sums), p.norm), w);
}

// One CTA per row of any d. It reads the row twice; the second read hits L1 or L2.
template <class T>
FI_DEVICE void rmsnorm_block_quant_loop(const RmsnormBlockQuantParams& p) {
  __shared__ float warp_sums[32];
  RmsnormRow<T, 8, 1, true> row;
  row.locate(p.norm, blockIdx.x);
  pdl_wait();
  float squares = 0.f;
  for (int i = threadIdx.x; i * 8 < p.norm.d; i += blockDim.x) {
    const ThreadVectors<8> vectors{i, 0, p.norm.d};
    row.load(p.norm, vectors);
    squares += row.partial_squares(vectors);
  }
  const float inv_rms = inverse_rms(block_sum(squares, warp_sums), p.norm);
  pdl_launch_dependents();
  // The trip count is the same for all threads, because the shuffles of store_quantized need whole warps.
  for (int first = 0; first * 8 < p.norm.d; first += blockDim.x) {
    const ThreadVectors<8> vectors{first + static_cast<int>(threadIdx.x), 0, p.norm.d};
    Vec<T, 8> w[1];
    row.load(p.norm, vectors);
    load_row(static_cast<const T*>(p.norm.weight), vectors, w);
    row.store_residual(p.norm, vectors);
    store_quantized(p, row, vectors, inv_rms, w);
  }
}

}  // namespace fi
