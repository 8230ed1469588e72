// RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) on sm_80 and later: a row is read once and lives in registers.
#pragma once
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/norm/rmsnorm.h"

namespace fi {
namespace rmsnorm_detail {

// kCount vectors of kVec elements a thread, `threads` of them a row; `lane` is this thread's place in the row.
template <class T, class O, int kVec, int kCount, bool kResidual>
struct Tile {
  float x[kCount][kVec];
  Vec<T, kVec> w[kCount];
  const RmsnormParams& p;
  int64_t row;
  uint32_t head;
  int lane, threads;

  FI_DEVICE Tile(const RmsnormParams& p, int64_t index, int lane, int threads) : p(p), lane(lane), threads(threads) {
    row = p.heads == 1 ? index : index / p.heads;
    head = p.heads == 1 ? 0 : static_cast<uint32_t>(index - row * p.heads);
  }
  FI_DEVICE int at(int k) const { return (k * threads + lane) * kVec; }

  FI_DEVICE float load_and_square() {
    const T* input = static_cast<const T*>(p.input) + row * p.input_row + head * p.input_head;
    T* residual = static_cast<T*>(p.residual) + row * p.residual_row;
    Vec<T, kVec> raw[kCount], added[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (at(k) < p.d) {
        raw[k] = load<T, kVec>(input + at(k));
        if constexpr (kResidual) added[k] = load<T, kVec>(residual + at(k));
      }
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (at(k) < p.d) w[k] = load<T, kVec>(static_cast<const T*>(p.weight) + at(k));
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (at(k) < p.d) {
        to_float(raw[k], x[k]);
        if constexpr (kResidual) {
          float r[kVec];
          to_float(added[k], r);
#pragma unroll
          for (int i = 0; i < kVec; ++i) x[k][i] += r[i];
          from_float(x[k], added[k]);
          store(residual + at(k), added[k]);
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += x[k][i] * x[k][i];
      }
    return sum;
  }

  FI_DEVICE void scale_and_store(float sum, float out_scale) {
    O* out = static_cast<O*>(p.out) + row * p.out_row + head * p.out_head;
    const float r = rsqrtf(sum / static_cast<float>(p.d) + p.eps);
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (at(k) < p.d) {
        float f[kVec];
        to_float(w[k], f);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          f[i] = x[k][i] * r * (f[i] + p.weight_bias);
          if constexpr (kIsFp8<O>) f[i] *= out_scale;
        }
        Vec<O, kVec> y;
        from_float(f, y);
        store(out + at(k), y);
      }
  }
};

template <class O>
FI_DEVICE float inverse_scale(const RmsnormParams& p) {
  if constexpr (kIsFp8<O>) return 1.f / *p.scale;
  return 1.f;
}

}  // namespace rmsnorm_detail

// One block a row: kVec * kCount * blockDim.x >= d.
template <class T, class O, int kVec, int kCount, bool kResidual>
FI_DEVICE void rmsnorm_block(const RmsnormParams& p) {
  __shared__ float partial[32];
  rmsnorm_detail::Tile<T, O, kVec, kCount, kResidual> tile(p, blockIdx.x, threadIdx.x, blockDim.x);
  pdl_wait();
  const float out_scale = rmsnorm_detail::inverse_scale<O>(p);
  const float sum = tile.load_and_square();
  pdl_launch_dependents();
  tile.scale_and_store(block_sum(sum, partial), out_scale);
}

// Short rows (per-head norms): kLanes lanes a row, several rows a warp, no shared memory.
template <class T, class O, int kVec, int kLanes, bool kResidual>
FI_DEVICE void rmsnorm_lanes(const RmsnormParams& p) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  pdl_wait();
  const bool inside = row < p.rows;  // all lanes stay: the shuffles below take whole warps
  rmsnorm_detail::Tile<T, O, kVec, 1, kResidual> tile(p, inside ? row : 0, threadIdx.x % kLanes, kLanes);
  const float out_scale = rmsnorm_detail::inverse_scale<O>(p);
  const float sum = warp_sum(inside ? tile.load_and_square() : 0.f, kLanes);
  pdl_launch_dependents();
  if (inside) tile.scale_and_store(sum, out_scale);
}

// Any d: the row is read twice, the second time from L1 or L2.
template <class T, class O, int kVec, bool kResidual>
FI_DEVICE void rmsnorm_loop(const RmsnormParams& p) {
  __shared__ float partial[32];
  const int64_t row = p.heads == 1 ? blockIdx.x : blockIdx.x / p.heads, head = p.heads == 1 ? 0 : blockIdx.x % p.heads;
  const T* input = static_cast<const T*>(p.input) + row * p.input_row + head * p.input_head;
  T* residual = static_cast<T*>(p.residual) + row * p.residual_row;
  O* out = static_cast<O*>(p.out) + row * p.out_row + head * p.out_head;
  auto sum_at = [&](int i, float(&x)[kVec]) {
    to_float(load<T, kVec>(input + i), x);
    if constexpr (kResidual) {
      float r[kVec];
      to_float(load<T, kVec>(residual + i), r);
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[j] += r[j];
    }
  };
  pdl_wait();
  const float out_scale = rmsnorm_detail::inverse_scale<O>(p);
  float sum = 0.f;
  for (int i = threadIdx.x * kVec; i < p.d; i += blockDim.x * kVec) {
    float x[kVec];
    sum_at(i, x);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += x[j] * x[j];
  }
  const float r = rsqrtf(block_sum(sum, partial) / static_cast<float>(p.d) + p.eps);
  pdl_launch_dependents();
  for (int i = threadIdx.x * kVec; i < p.d; i += blockDim.x * kVec) {
    float x[kVec], y[kVec];
    sum_at(i, x);
    if constexpr (kResidual) {
      Vec<T, kVec> rounded;
      from_float(x, rounded);
      store(residual + i, rounded);
    }
    to_float(load<T, kVec>(static_cast<const T*>(p.weight) + i), y);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      y[j] = x[j] * r * (y[j] + p.weight_bias);
      if constexpr (kIsFp8<O>) y[j] *= out_scale;
    }
    Vec<O, kVec> rounded;
    from_float(y, rounded);
    store(out + i, rounded);
  }
}

}  // namespace fi
