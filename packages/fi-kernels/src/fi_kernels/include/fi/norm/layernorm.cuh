// LayerNorm (Ba et al. 2016, arXiv:1607.06450) on sm_80 and later: mean, then variance, of a row held in registers.
#pragma once
#include "fi/norm/layernorm.h"
#include "fi/norm/row.cuh"

namespace fi {

// One row while it is in registers.
template <class T, int kVec, int kCount>
struct LayernormRow {
  Vec<T, kVec> x[kCount];

  FI_DEVICE void load(const LayernormParams& p, uint32_t row, const Deal<kVec>& deal) {
    load_row(static_cast<const T*>(p.input) + row * p.input_row, deal, x);
  }
  // This thread's part of sum((x - center)^power).
  template <int kPower>
  FI_DEVICE float moment(const Deal<kVec>& deal, float center) const {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (deal.has(k)) {
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
  FI_DEVICE void store_normed(const LayernormParams& p, uint32_t row, const Deal<kVec>& deal, float mean, float r,
                              float out_scale) const {
    O* out = static_cast<O*>(p.out) + row * p.out_row;
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (deal.has(k)) {
        float y[kVec], gamma[kVec], beta[kVec];
        to_float(x[k], y);
        load_floats(p.gamma + deal.at(k), gamma);
        load_floats(p.beta + deal.at(k), beta);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          y[i] = (y[i] - mean) * r * gamma[i] + beta[i];
          if constexpr (kIsFp8<O>) y[i] *= out_scale;
        }
        Vec<O, kVec> rounded;
        from_float(y, rounded);
        store(out + deal.at(k), rounded);
      }
  }
};

// The row's first element: sums of differences from it keep their digits where the row lies far from zero.
template <class T>
FI_DEVICE float pivot(const LayernormParams& p, uint32_t row) {
  return to_float(static_cast<const T*>(p.input)[row * p.input_row]);
}

FI_DEVICE float inverse_deviation(float sum, const LayernormParams& p) { return rsqrtf(sum * p.inverse_d + p.eps); }

// One block a row: kVec * kCount * blockDim.x >= d.
template <class T, class O, int kVec, int kCount>
FI_DEVICE void layernorm_block(const LayernormParams& p) {
  __shared__ float partial[2][32];
  const Deal<kVec> deal{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), p.d};
  LayernormRow<T, kVec, kCount> row;
  pdl_wait();
  row.load(p, blockIdx.x, deal);
  const float out_scale = inverse_scale<O>(p.scale);
  const float first = pivot<T>(p, blockIdx.x);
  const float mean = first + block_sum(row.template moment<1>(deal, first), partial[0]) * p.inverse_d;
  pdl_launch_dependents();
  forget_values(row.x);
  const float r = inverse_deviation(block_sum(row.template moment<2>(deal, mean), partial[1]), p);
  forget_values(row.x);
  row.template store_normed<O>(p, blockIdx.x, deal, mean, r, out_scale);
}

// Short rows: one warp a row, no shared memory.
template <class T, class O, int kVec, int kCount>
FI_DEVICE void layernorm_warp(const LayernormParams& p) {
  const uint32_t index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const Deal<kVec> deal{static_cast<int>(threadIdx.x) % 32, 32, p.d};
  pdl_wait();
  if (index >= static_cast<uint32_t>(p.rows)) return;
  LayernormRow<T, kVec, kCount> row;
  row.load(p, index, deal);
  const float out_scale = inverse_scale<O>(p.scale);
  const float first = pivot<T>(p, index);
  const float mean = first + warp_sum(row.template moment<1>(deal, first)) * p.inverse_d;
  pdl_launch_dependents();
  forget_values(row.x);
  const float r = inverse_deviation(warp_sum(row.template moment<2>(deal, mean)), p);
  forget_values(row.x);
  row.template store_normed<O>(p, index, deal, mean, r, out_scale);
}

// Any d: one block a row, which is read three times, from L1 or L2 after the first.
template <class T, class O, int kVec>
FI_DEVICE void layernorm_loop(const LayernormParams& p) {
  __shared__ float partial[2][32];
  LayernormRow<T, kVec, 1> row;
  pdl_wait();
  const float out_scale = inverse_scale<O>(p.scale);
  const float first = pivot<T>(p, blockIdx.x);
  float sum = 0.f, squares = 0.f;
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const Deal<kVec> deal{i, 0, p.d};
    row.load(p, blockIdx.x, deal);
    sum += row.template moment<1>(deal, first);
  }
  const float mean = first + block_sum(sum, partial[0]) * p.inverse_d;
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const Deal<kVec> deal{i, 0, p.d};
    row.load(p, blockIdx.x, deal);
    squares += row.template moment<2>(deal, mean);
  }
  const float r = inverse_deviation(block_sum(squares, partial[1]), p);
  pdl_launch_dependents();
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const Deal<kVec> deal{i, 0, p.d};
    row.load(p, blockIdx.x, deal);
    row.template store_normed<O>(p, blockIdx.x, deal, mean, r, out_scale);
  }
}

}  // namespace fi
