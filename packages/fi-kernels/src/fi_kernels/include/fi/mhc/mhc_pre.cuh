// mhc_pre on sm_80 and later: CTAs of a token share its columns; the first warp of each computes the mix.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/mhc/mhc_pre.h"

namespace fi {

// Loads a vector of each stream of a token.
template <class T, int kVec>
FI_DEVICE void load_streams(const MhcPreParams& p, int column, Vec<T, kVec> (&x)[kMhcStreams]) {
  const T* residual = static_cast<const T*>(p.residual) + blockIdx.x * p.residual_token + column;
#pragma unroll
  for (int m = 0; m < kMhcStreams; ++m) x[m] = load<T, kVec>(residual + m * p.residual_stream);
}

// The sum of the squares of this thread's columns.
template <class T, int kVec>
FI_DEVICE float partial_squares(const MhcPreParams& p, int column, int step) {
  float sum = 0.f;
  for (; column < p.h; column += step) {
    Vec<T, kVec> streams[kMhcStreams];
    load_streams(p, column, streams);
#pragma unroll
    for (int m = 0; m < kMhcStreams; ++m) {
      float x[kVec];
      to_float(streams[m], x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum += x[i] * x[i];
    }
  }
  return sum;
}

// Logit `lane` of a warp's token, normalized, scaled and shifted; any number from lane 24 on.
FI_DEVICE float mix_logit(const MhcPreParams& p, float squares, int lane) {
  const int index = min(lane, kMhcLogits - 1), part = min(index / kMhcStreams, 2);
  float sum = 0.f;
  for (int64_t row = blockIdx.x, s = 0; s < p.splits; ++s, row += p.tokens) {
    sum += p.logits[row * kMhcLogits + index];
    if (p.squares) squares += p.squares[row];
  }
  return sum * rsqrtf(squares * p.inv_k + p.rms_eps) * p.scale[part] + p.base[index];
}

FI_DEVICE float mix_sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Element lane % 16 of a 4 x 4 matrix of logits becomes that of a matrix whose rows and columns sum to about 1
// (Sinkhorn-Knopp): softmax of rows, then columns and rows in turn, columns last.
FI_DEVICE float sinkhorn(float x, int repeat, float eps) {
  const auto over_columns = [eps](float y) {
    float sum = y + __shfl_xor_sync(0xffffffffu, y, 4);
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    return y * reciprocal_approx(sum + eps);
  };
  x = expf(x - warp_max(x, kMhcStreams));
  x = over_columns(x * reciprocal_approx(warp_sum(x, kMhcStreams)) + eps);
  for (int i = 1; i < repeat; ++i) x = over_columns(x * reciprocal_approx(warp_sum(x, kMhcStreams) + eps));
  return x;
}

// kOwnSquares: the sum of squares is that of the residual, so one CTA reads all columns of a token, twice.
template <class T, int kVec, bool kOwnSquares>
FI_DEVICE void mhc_pre(const MhcPreParams& p) {
  __shared__ float pre[kMhcStreams];
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % 32, step = gridDim.y * blockDim.x * kVec;
  int column = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  pdl_wait();
  float squares = 0.f;
  if constexpr (kOwnSquares) {
    __shared__ float partial[32];
    squares = block_sum(partial_squares<T, kVec>(p, column, step), partial);
  }
  Vec<T, kVec> streams[kMhcStreams];
  if (column < p.h) load_streams(p, column, streams);  // in flight while the mix is computed
  const bool writes_mix = threadIdx.x < 32 && blockIdx.y == 0;
  float logit = 0.f;
  if (threadIdx.x < 32) {
    logit = mix_logit(p, squares, lane);
    if (lane < kMhcStreams) pre[lane] = mix_sigmoid(logit) + p.pre_eps;
    if (writes_mix && lane >= kMhcStreams && lane < 2 * kMhcStreams)
      p.post[token * kMhcStreams + lane - kMhcStreams] = mix_sigmoid(logit) * p.post_factor;
  }
  __syncthreads();
  pdl_launch_dependents();
  while (column < p.h) {
    float y[kVec] = {};
#pragma unroll
    for (int m = 0; m < kMhcStreams; ++m) {
      float x[kVec];
      to_float(streams[m], x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] += x[i] * pre[m];
    }
    Vec<T, kVec> result;
    from_float(y, result);
    store(static_cast<T*>(p.layer_input) + token * p.input_token + column, result);
    column += step;
    if (column < p.h) load_streams(p, column, streams);
  }
  if (!writes_mix) return;
  constexpr int kElements = kMhcStreams * kMhcStreams;
  const float own = __shfl_sync(0xffffffffu, logit, 2 * kMhcStreams + lane % kElements);
  const float comb = sinkhorn(own, p.repeat, p.sinkhorn_eps);
  if (lane < kElements) p.comb[token * kElements + lane] = comb;
}

}  // namespace fi
