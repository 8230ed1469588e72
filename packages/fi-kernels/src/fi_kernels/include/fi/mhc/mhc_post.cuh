// mhc_post on sm_80 and later: one thread for a vector of a token's columns, in all four streams.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/mhc/mhc_post.h"

namespace fi {

template <class T, int kVec>
FI_DEVICE void mhc_post(const MhcPostParams& p) {
  const int64_t token = blockIdx.x;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  if (column >= p.h) return;
  const T* residual = static_cast<const T*>(p.residual) + token * p.residual_token + column;
  pdl_wait();
  const Vec<T, kVec> layer = load<T, kVec>(static_cast<const T*>(p.x) + token * p.x_token + column);
  Vec<T, kVec> old[kMhcStreams];
#pragma unroll
  for (int o = 0; o < kMhcStreams; ++o) old[o] = load<T, kVec>(residual + o * p.residual_stream);
  pdl_launch_dependents();
  float x[kVec], y[kMhcStreams][kVec];
  to_float(layer, x);
#pragma unroll
  for (int n = 0; n < kMhcStreams; ++n) {
    const float post = p.post[token * kMhcStreams + n];
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[n][i] = x[i] * post;
  }
#pragma unroll
  for (int o = 0; o < kMhcStreams; ++o) {
    to_float(old[o], x);
#pragma unroll
    for (int n = 0; n < kMhcStreams; ++n) {
      const float comb = p.comb[(token * kMhcStreams + o) * kMhcStreams + n];
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[n][i] += x[i] * comb;
    }
  }
  T* out = static_cast<T*>(p.out) + token * p.out_token + column;
#pragma unroll
  for (int n = 0; n < kMhcStreams; ++n) {
    Vec<T, kVec> result;
    from_float(y[n], result);
    store(out + n * p.out_stream, result);
  }
}

}  // namespace fi
