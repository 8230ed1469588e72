// LayerNorm (Ba et al. 2016, arXiv:1607.06450) on sm_80 and later: mean, then variance, of a row held in registers.
#pragma once
#include "fi/norm/layernorm.h"
#include "fi/norm/register_row.cuh"

namespace fi {

// The part of one row that a thread holds in registers.
template <class T, int kVec, int kNumVecs>
struct LayernormRow {
  Vec<T, kVec> x[kNumVecs];

  FI_DEVICE void load(const LayernormParams& p, uint32_t row, const ThreadVectors<kVec>& vectors) {
    load_row(static_cast<const T*>(p.input) + row * p.input_row_stride, vectors, x);
  }
  // This thread's partial sum of (x - center)^power.
  template <int kPower>
  FI_DEVICE float partial_moment(const ThreadVectors<kVec>& vectors, float center) const {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kNumVecs; ++k)
      if (vectors.inside(k)) {
        float f[kVec];
        to_float(x[k], f);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float c = f[i] - center;
          sum += kPower == 1 ? c : c * c;
        }
      }
    return sum;
  }
  template <class O>
  FI_DEVICE void store_normalized(const LayernormParams& p, uint32_t row, const ThreadVectors<kVec>& vectors,
                                  float mean, float inv_std, float out_factor) const {
    O* out = static_cast<O*>(p.out) + row * p.out_row_stride;
#pragma unroll
    for (int k = 0; k < kNumVecs; ++k)
      if (vectors.inside(k)) {
        float y[kVec], gamma[kVec], beta[kVec];
        to_float(x[k], y);
        load_floats(p.gamma + vectors.offset(k), gamma);
        load_floats(p.beta + vectors.offset(k), beta);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          y[i] = (y[i] - mean) * inv_std * gamma[i] + beta[i];
          if constexpr (kIsFp8<O>) y[i] *= out_factor;
        }
        Vec<O, kVec> out_vec;
        from_float(y, out_vec);
        store(out + vectors.offset(k), out_vec);
      }
  }
};

// The shift of the shifted-data mean: the row's first element. Differences from it are small where the row lies far
// from zero, so their sum loses no digits.
template <class T>
FI_DEVICE float load_shift(const LayernormParams& p, uint32_t row) {
  return to_float(static_cast<const T*>(p.input)[row * p.input_row_stride]);
}

FI_DEVICE float inverse_std(float squares, const LayernormParams& p) { return rsqrtf(squares * p.inv_d + p.eps); }

// One CTA per row, held in registers: kVec * kNumVecs * blockDim.x >= d.
template <class T, class O, int kVec, int kNumVecs>
FI_DEVICE void layernorm_cta(const LayernormParams& p) {
  __shared__ float warp_sums[2][32];
  const ThreadVectors<kVec> vectors{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), p.d};
  LayernormRow<T, kVec, kNumVecs> row;
  pdl_wait();
  row.load(p, blockIdx.x, vectors);
  const float out_factor = quant_factor<O>(p.scale);
  const float shift = load_shift<T>(p, blockIdx.x);
  const float mean = shift + block_sum(row.template partial_moment<1>(vectors, shift), warp_sums[0]) * p.inv_d;
  pdl_launch_dependents();
  optimization_barrier(row.x);
  const float inv_std = inverse_std(block_sum(row.template partial_moment<2>(vectors, mean), warp_sums[1]), p);
  optimization_barrier(row.x);
  row.template store_normalized<O>(p, blockIdx.x, vectors, mean, inv_std, out_factor);
}

// One warp per row, held in registers, for short rows: kVec * kNumVecs * 32 >= d. Uses no shared memory.
template <class T, class O, int kVec, int kNumVecs>
FI_DEVICE void layernorm_warp(const LayernormParams& p) {
  const uint32_t index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const ThreadVectors<kVec> vectors{static_cast<int>(threadIdx.x) % 32, 32, p.d};
  pdl_wait();
  if (index >= static_cast<uint32_t>(p.rows)) return;
  LayernormRow<T, kVec, kNumVecs> row;
  row.load(p, index, vectors);
  const float out_factor = quant_factor<O>(p.scale);
  const float shift = load_shift<T>(p, index);
  const float mean = shift + warp_sum(row.template partial_moment<1>(vectors, shift)) * p.inv_d;
  pdl_launch_dependents();
  optimization_barrier(row.x);
  const float inv_std = inverse_std(warp_sum(row.template partial_moment<2>(vectors, mean)), p);
  optimization_barrier(row.x);
  row.template store_normalized<O>(p, index, vectors, mean, inv_std, out_factor);
}

// One CTA per row of any d. It reads the row three times; the second and third read hit L1 or L2.
template <class T, class O, int kVec>
FI_DEVICE void layernorm_loop(const LayernormParams& p) {
  __shared__ float warp_sums[2][32];
  LayernormRow<T, kVec, 1> row;
  pdl_wait();
  const float out_factor = quant_factor<O>(p.scale);
  const float shift = load_shift<T>(p, blockIdx.x);
  float sum = 0.f, squares = 0.f;
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const ThreadVectors<kVec> vectors{i, 0, p.d};
    row.load(p, blockIdx.x, vectors);
    sum += row.template partial_moment<1>(vectors, shift);
  }
  const float mean = shift + block_sum(sum, warp_sums[0]) * p.inv_d;
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const ThreadVectors<kVec> vectors{i, 0, p.d};
    row.load(p, blockIdx.x, vectors);
    squares += row.template partial_moment<2>(vectors, mean);
  }
  const float inv_std = inverse_std(block_sum(squares, warp_sums[1]), p);
  pdl_launch_dependents();
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const ThreadVectors<kVec> vectors{i, 0, p.d};
    row.load(p, blockIdx.x, vectors);
    row.template store_normalized<O>(p, blockIdx.x, vectors, mean, inv_std, out_factor);
  }
}

}  // namespace fi
