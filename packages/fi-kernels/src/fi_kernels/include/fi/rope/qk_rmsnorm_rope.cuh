// qk_rmsnorm_rope on sm_80 and later: a CTA for the heads of q, of k or of v of one token, held in registers.
#pragma once
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/rope/qk_rmsnorm_rope.h"

namespace fi {

// The vector that one thread owns in each of its heads, and the one that holds the other elements of its pairs: itself
// if pairs are neighbours, else the one half the rotary width away.
template <class T, int kHeads, bool kInterleave>
struct QkThread {
  static constexpr int kVec = 8, kPairs = kInterleave ? kVec / 2 : kVec;
  int column, partner, head, heads_in_parallel;
  bool rotated;
  Vec<T, kVec> own[kHeads], other[kInterleave ? 1 : kHeads];
  float cosine[kPairs], sine[kPairs];

  FI_DEVICE QkThread(const QkRmsnormRopeParams& p, int kind) {
    const int lane = threadIdx.x & (p.lanes - 1), half = p.rotary_dim / 2;
    head = threadIdx.x / p.lanes, heads_in_parallel = blockDim.x / p.lanes;
    column = lane * kVec;
    rotated = kind < 2 && column < p.rotary_dim;
    partner = !rotated || kInterleave ? column : column < half ? column + half : column - half;
  }
  FI_DEVICE bool inside(const QkRmsnormRopeParams& p, int kind, int k) const {
    return column < p.head_dim && head + k * heads_in_parallel < p.heads[kind];
  }
  FI_DEVICE void load_heads(const QkRmsnormRopeParams& p, int kind, const T* row) {
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (!inside(p, kind, k)) continue;
      const T* first = row + (head + k * heads_in_parallel) * p.qkv_head;
      own[k] = load<T, kVec>(first + column);
      if constexpr (!kInterleave) other[k] = load<T, kVec>(first + partner);
    }
  }
  FI_DEVICE float partial_squares(const QkRmsnormRopeParams& p, int kind) const {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (!inside(p, kind, k)) continue;
      float x[kVec];
      to_float(own[k], x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum += x[i] * x[i];
    }
    return sum;
  }
  FI_DEVICE void compute_angles(const QkRmsnormRopeParams& p) {
    const auto at = p.place(blockIdx.x);
    const int first = kInterleave ? column / 2 : min(column, partner);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) p.angle(at, first + i, &cosine[i], &sine[i]);
  }
  // x times the norm's factor and weight.
  FI_DEVICE static void normalize(const Vec<T, kVec>& x, const T* weight, float inv_rms, float (&y)[kVec]) {
    to_float(x, y);
    if (!weight) return;
    float w[kVec];
    to_float(load<T, kVec>(weight), w);
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] *= inv_rms * w[i];
  }
  // Head k, normalized and rotated.
  FI_DEVICE void rotated_head(const T* weight, int k, float inv_rms, float (&y)[kVec]) const {
    normalize(own[k], weight ? weight + column : nullptr, inv_rms, y);
    if (!rotated) return;
    if constexpr (kInterleave) {
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const float x = y[i];
        y[i] = x * cosine[i / 2] - y[i + 1] * sine[i / 2];
        y[i + 1] = y[i + 1] * cosine[i / 2] + x * sine[i / 2];
      }
    } else {
      float z[kVec];
      normalize(other[k], weight ? weight + partner : nullptr, inv_rms, z);
      const float sign = column < partner ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = y[i] * cosine[i] + sign * z[i] * sine[i];
    }
  }
};

template <class T, class O, int kHeads, bool kInterleave>
FI_DEVICE void qk_rmsnorm_rope(const QkRmsnormRopeParams& p) {
  constexpr int kVec = QkThread<T, kHeads, kInterleave>::kVec;
  __shared__ float partial[32];
  const int kind = blockIdx.y;  // q, k or v
  const int64_t token = blockIdx.x;
  const int heads_before = kind == 0 ? 0 : kind == 1 ? p.heads[0] : p.heads[0] + p.heads[1];
  QkThread<T, kHeads, kInterleave> thread(p, kind);
  pdl_wait();
  thread.load_heads(p, kind, static_cast<const T*>(p.qkv) + token * p.qkv_row + heads_before * p.qkv_head);
  pdl_launch_dependents();
  if (thread.rotated) thread.compute_angles(p);
  const T* weight = static_cast<const T*>(kind < 2 ? p.weight[kind] : nullptr);
  float inv_rms = 1.f;
  if (weight) inv_rms = rsqrtf(block_sum(thread.partial_squares(p, kind), partial) * p.inv_d[kind] + p.eps);
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    if (!thread.inside(p, kind, k)) continue;
    const int head = thread.head + k * thread.heads_in_parallel;
    float y[kVec];
    thread.rotated_head(weight ? weight + head * p.head_dim : nullptr, k, inv_rms, y);
    if constexpr (kIsFp8<O>) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] *= p.scale[kind];
    }
    Vec<O, kVec> result;
    from_float(y, result);
    store(static_cast<O*>(p.out[kind]) + token * p.out_row[kind] + head * p.out_head[kind] + thread.column, result);
  }
}

}  // namespace fi
