// RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) on sm_80 and later: a row is read once and lives in registers.
#pragma once
#include "fi/norm/rmsnorm.h"
#include "fi/norm/row.cuh"

namespace fi {

// One row while it is in registers: s = x, or x + residual in fp32.
template <class T, int kVec, int kCount, bool kResidual>
struct RmsnormRow {
  Vec<T, kVec> x[kCount], added[kCount];
  uint32_t row, head;

  FI_DEVICE void locate(const RmsnormParams& p, uint32_t index) {
    row = divide(index, p.heads);
    head = index - row * p.heads.value;
  }
  FI_DEVICE T* residual(const RmsnormParams& p) const { return static_cast<T*>(p.residual) + row * p.residual_row; }
  template <class O>
  FI_DEVICE O* out(const RmsnormParams& p) const {
    return static_cast<O*>(p.out) + row * p.out_row + head * p.out_head;
  }
  FI_DEVICE const T* input(const RmsnormParams& p) const {
    return static_cast<const T*>(p.input) + row * p.input_row + head * p.input_head;
  }

  FI_DEVICE void load(const RmsnormParams& p, const Deal<kVec>& deal) {
    load_row(input(p), deal, x);
    if constexpr (kResidual) load_row(static_cast<const T*>(residual(p)), deal, added);
  }
  FI_DEVICE void sum_at(int k, float (&s)[kVec]) const {
    to_float(x[k], s);
    if constexpr (kResidual) {
      float r[kVec];
      to_float(added[k], r);
#pragma unroll
      for (int i = 0; i < kVec; ++i) s[i] += r[i];
    }
  }
  // This thread's part of sum(s^2).
  FI_DEVICE float squares(const Deal<kVec>& deal) const {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (deal.has(k)) {
        float s[kVec];
        sum_at(k, s);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += s[i] * s[i];
      }
    return sum;
  }
  // NOTE: hides from the compiler what it knows of the row, else it carries the fp32 form of what `squares` computed
  // over the reduction: twice the registers (bf16, 8192 wide: 79 instead of 48), half the blocks on an SM.
  FI_DEVICE void forget() {
    forget_values(x);
    if constexpr (kResidual) forget_values(added);
  }
  FI_DEVICE void store_residual(const RmsnormParams& p, const Deal<kVec>& deal) const {
    if constexpr (kResidual) {
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        if (deal.has(k)) {
          float s[kVec];
          sum_at(k, s);
          Vec<T, kVec> rounded;
          from_float(s, rounded);
          store(residual(p) + deal.at(k), rounded);
        }
    }
  }
  // s * r * (w + bias), before rounding.
  FI_DEVICE void normed_at(const RmsnormParams& p, int k, float r, const Vec<T, kVec>& w, float (&y)[kVec]) const {
    float s[kVec];
    sum_at(k, s);
    to_float(w, y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = s[i] * r * (y[i] + p.weight_bias);
  }
  template <class O>
  FI_DEVICE void store_normed(const RmsnormParams& p, const Deal<kVec>& deal, float r, float out_scale,
                              const Vec<T, kVec> (&w)[kCount]) const {
    O* to = out<O>(p);
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (deal.has(k)) {
        float y[kVec];
        normed_at(p, k, r, w[k], y);
        if constexpr (kIsFp8<O>) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) y[i] *= out_scale;
        }
        Vec<O, kVec> rounded;
        from_float(y, rounded);
        store(to + deal.at(k), rounded);
      }
  }
};

FI_DEVICE float inverse_rms(float sum, const RmsnormParams& p) { return rsqrtf(sum * p.inverse_d + p.eps); }

// One block a row: kVec * kCount * blockDim.x >= d.
template <class T, class O, int kVec, int kCount, bool kResidual>
FI_DEVICE void rmsnorm_block(const RmsnormParams& p) {
  __shared__ float partial[32];
  const Deal<kVec> deal{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), p.d};
  RmsnormRow<T, kVec, kCount, kResidual> row;
  Vec<T, kVec> w[kCount];
  row.locate(p, blockIdx.x);
  pdl_wait();
  row.load(p, deal);
  load_row(static_cast<const T*>(p.weight), deal, w);
  const float out_scale = inverse_scale<O>(p.scale);
  const float sum = row.squares(deal);
  row.store_residual(p, deal);
  row.forget();
  pdl_launch_dependents();
  row.template store_normed<O>(p, deal, inverse_rms(block_sum(sum, partial), p), out_scale, w);
}

// Short rows (per-head norms): kLanes lanes share kRows rows, several rows a warp, no shared memory.
template <class T, class O, int kVec, int kLanes, int kCount, int kRows, bool kResidual>
FI_DEVICE void rmsnorm_lanes(const RmsnormParams& p) {
  const uint32_t groups = blockDim.x / kLanes;
  const uint32_t first = blockIdx.x * groups * kRows + threadIdx.x / kLanes;
  const Deal<kVec> deal{static_cast<int>(threadIdx.x) % kLanes, kLanes, p.d};
  RmsnormRow<T, kVec, kCount, kResidual> row[kRows];
  Vec<T, kVec> w[kCount];
  bool inside[kRows];  // all lanes stay: the shuffles below take whole warps
  float sum[kRows];
  pdl_wait();
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const uint32_t index = first + j * groups;
    inside[j] = index < static_cast<uint32_t>(p.rows);
    row[j].locate(p, index);
    if (inside[j]) row[j].load(p, deal);
  }
  load_row(static_cast<const T*>(p.weight), deal, w);
  const float out_scale = inverse_scale<O>(p.scale);
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    sum[j] = inside[j] ? row[j].squares(deal) : 0.f;
    if (inside[j]) row[j].store_residual(p, deal);
    row[j].forget();
  }
  pdl_launch_dependents();
#pragma unroll
  for (int j = 0; j < kRows; ++j) sum[j] = warp_sum(sum[j], kLanes);
#pragma unroll
  for (int j = 0; j < kRows; ++j)
    if (inside[j]) row[j].template store_normed<O>(p, deal, inverse_rms(sum[j], p), out_scale, w);
}

// Any d: one block a row, which is read twice, the second time from L1 or L2.
template <class T, class O, int kVec, bool kResidual>
FI_DEVICE void rmsnorm_loop(const RmsnormParams& p) {
  __shared__ float partial[32];
  RmsnormRow<T, kVec, 1, kResidual> row;
  row.locate(p, blockIdx.x);
  pdl_wait();
  const float out_scale = inverse_scale<O>(p.scale);
  float sum = 0.f;
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const Deal<kVec> deal{i, 0, p.d};
    row.load(p, deal);
    sum += row.squares(deal);
  }
  const float r = inverse_rms(block_sum(sum, partial), p);
  pdl_launch_dependents();
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const Deal<kVec> deal{i, 0, p.d};
    Vec<T, kVec> w[1];
    row.load(p, deal);
    load_row(static_cast<const T*>(p.weight), deal, w);
    row.store_residual(p, deal);
    row.template store_normed<O>(p, deal, r, out_scale, w);
  }
}

}  // namespace fi
