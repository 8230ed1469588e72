// RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) on sm_80 and later: each row is read once and held in registers.
#pragma once
#include "fi/norm/register_row.cuh"
#include "fi/norm/rmsnorm.h"

namespace fi {

// The part of one row that a thread holds in registers: s = x, or s = x + residual in fp32.
template <class T, int kVec, int kNumVecs, bool kResidual>
struct RmsnormRow {
  Vec<T, kVec> x[kNumVecs], r[kNumVecs];
  uint32_t row, head;

  FI_DEVICE void locate(const RmsnormParams& p, uint32_t index) {
    row = divide(index, p.heads);
    head = index - row * p.heads.value;
  }
  FI_DEVICE T* residual(const RmsnormParams& p) const {
    return static_cast<T*>(p.residual) + row * p.residual_row_stride;
  }
  template <class O>
  FI_DEVICE O* out(const RmsnormParams& p) const {
    return static_cast<O*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
  }
  FI_DEVICE const T* input(const RmsnormParams& p) const {
    return static_cast<const T*>(p.input) + row * p.input_row_stride + head * p.input_head_stride;
  }

  FI_DEVICE void load(const RmsnormParams& p, const ThreadVectors<kVec>& vectors) {
    load_row(input(p), vectors, x);
    if constexpr (kResidual) load_row(static_cast<const T*>(residual(p)), vectors, r);
  }
  // Vector k of s, in fp32.
  FI_DEVICE void get_fp32(int k, float (&s)[kVec]) const {
    to_float(x[k], s);
    if constexpr (kResidual) {
      float added[kVec];
      to_float(r[k], added);
#pragma unroll
      for (int i = 0; i < kVec; ++i) s[i] += added[i];
    }
  }
  // This thread's partial sum of s^2.
  FI_DEVICE float partial_squares(const ThreadVectors<kVec>& vectors) const {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kNumVecs; ++k)
      if (vectors.inside(k)) {
        float s[kVec];
        get_fp32(k, s);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += s[i] * s[i];
      }
    return sum;
  }
  // NOTE: without this barrier the compiler keeps the fp32 values of partial_squares alive across the reduction. That
  // costs registers (bf16, d = 8192: 79 instead of 48), which halves the CTAs per SM.
  FI_DEVICE void barrier() {
    optimization_barrier(x);
    if constexpr (kResidual) optimization_barrier(r);
  }
  FI_DEVICE void store_residual(const RmsnormParams& p, const ThreadVectors<kVec>& vectors) const {
    if constexpr (kResidual) {
#pragma unroll
      for (int k = 0; k < kNumVecs; ++k)
        if (vectors.inside(k)) {
          float s[kVec];
          get_fp32(k, s);
          Vec<T, kVec> out_vec;
          from_float(s, out_vec);
          store(residual(p) + vectors.offset(k), out_vec);
        }
    }
  }
  // y = s * inv_rms * (w + weight_bias) of vector k, in fp32.
  FI_DEVICE void normalize(const RmsnormParams& p, int k, float inv_rms, const Vec<T, kVec>& w,
                           float (&y)[kVec]) const {
    float s[kVec];
    get_fp32(k, s);
    to_float(w, y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = s[i] * inv_rms * (y[i] + p.weight_bias);
  }
  template <class O>
  FI_DEVICE void store_normalized(const RmsnormParams& p, const ThreadVectors<kVec>& vectors, float inv_rms,
                                  float out_factor, const Vec<T, kVec> (&w)[kNumVecs]) const {
    O* dst = out<O>(p);
#pragma unroll
    for (int k = 0; k < kNumVecs; ++k)
      if (vectors.inside(k)) {
        float y[kVec];
        normalize(p, k, inv_rms, w[k], y);
        if constexpr (kIsFp8<O>) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) y[i] *= out_factor;
        }
        Vec<O, kVec> out_vec;
        from_float(y, out_vec);
        store(dst + vectors.offset(k), out_vec);
      }
  }
};

FI_DEVICE float inverse_rms(float squares, const RmsnormParams& p) { return rsqrtf(squares * p.inv_d + p.eps); }

// One CTA per row, held in registers: kVec * kNumVecs * blockDim.x >= d.
template <class T, class O, int kVec, int kNumVecs, bool kResidual>
FI_DEVICE void rmsnorm_cta(const RmsnormParams& p) {
  __shared__ float warp_sums[32];
  const ThreadVectors<kVec> vectors{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), p.d};
  RmsnormRow<T, kVec, kNumVecs, kResidual> row;
  Vec<T, kVec> w[kNumVecs];
  row.locate(p, blockIdx.x);
  pdl_wait();
  row.load(p, vectors);
  load_row(static_cast<const T*>(p.weight), vectors, w);
  const float out_factor = quant_factor<O>(p.scale);
  const float squares = row.partial_squares(vectors);
  row.store_residual(p, vectors);
  row.barrier();
  pdl_launch_dependents();
  row.template store_normalized<O>(p, vectors, inverse_rms(block_sum(squares, warp_sums), p), out_factor, w);
}

// Short rows (per-head norms): kLanes lanes of a warp hold kRows rows in registers. Uses no shared memory.
template <class T, class O, int kVec, int kLanes, int kNumVecs, int kRows, bool kResidual>
FI_DEVICE void rmsnorm_warp(const RmsnormParams& p) {
  const uint32_t row_step = blockDim.x / kLanes;  // rows that the CTA reads at once
  const uint32_t first = blockIdx.x * row_step * kRows + threadIdx.x / kLanes;
  const ThreadVectors<kVec> vectors{static_cast<int>(threadIdx.x) % kLanes, kLanes, p.d};
  RmsnormRow<T, kVec, kNumVecs, kResidual> row[kRows];
  Vec<T, kVec> w[kNumVecs];
  bool inside[kRows];  // lanes without a row do not return: the shuffles below need whole warps
  float squares[kRows];
  pdl_wait();
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const uint32_t index = first + j * row_step;
    inside[j] = index < static_cast<uint32_t>(p.rows);
    row[j].locate(p, index);
    if (inside[j]) row[j].load(p, vectors);
  }
  load_row(static_cast<const T*>(p.weight), vectors, w);
  const float out_factor = quant_factor<O>(p.scale);
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    squares[j] = inside[j] ? row[j].partial_squares(vectors) : 0.f;
    if (inside[j]) row[j].store_residual(p, vectors);
    row[j].barrier();
  }
  pdl_launch_dependents();
#pragma unroll
  for (int j = 0; j < kRows; ++j) squares[j] = warp_sum(squares[j], kLanes);
#pragma unroll
  for (int j = 0; j < kRows; ++j)
    if (inside[j]) row[j].template store_normalized<O>(p, vectors, inverse_rms(squares[j], p), out_factor, w);
}

// One CTA per row of any d. It reads the row twice; the second read hits L1 or L2.
template <class T, class O, int kVec, bool kResidual>
FI_DEVICE void rmsnorm_loop(const RmsnormParams& p) {
  __shared__ float warp_sums[32];
  RmsnormRow<T, kVec, 1, kResidual> row;
  row.locate(p, blockIdx.x);
  pdl_wait();
  const float out_factor = quant_factor<O>(p.scale);
  float squares = 0.f;
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const ThreadVectors<kVec> vectors{i, 0, p.d};
    row.load(p, vectors);
    squares += row.partial_squares(vectors);
  }
  const float inv_rms = inverse_rms(block_sum(squares, warp_sums), p);
  pdl_launch_dependents();
  for (int i = threadIdx.x; i * kVec < p.d; i += blockDim.x) {
    const ThreadVectors<kVec> vectors{i, 0, p.d};
    Vec<T, kVec> w[1];
    row.load(p, vectors);
    load_row(static_cast<const T*>(p.weight), vectors, w);
    row.store_residual(p, vectors);
    row.template store_normalized<O>(p, vectors, inv_rms, out_factor, w);
  }
}

}  // namespace fi
