// lora_sum on sm_80 and later: a CTA has columns of one token. It finds the token's pairs by ballots, in their order.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/lora/lora_sum.h"

namespace fi {

constexpr int kLoraSumThreads = 256;

template <class X, int kVec>
FI_DEVICE void add_lora_row(const LoraSumParams& p, int pair, int first, float (&sum)[kVec]) {
  const int row = p.row_of(pair);
  if (row < 0 || first >= p.width) return;
  float x[kVec];
  to_float(load<X, kVec>(static_cast<const X*>(p.x) + row * p.x_row_stride + first), x);
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] = fmaf(p.weight_of(pair), x[i], sum[i]);
}

// kVec: columns of a thread.
template <class X, class Out, int kVec>
FI_DEVICE void lora_sum(const LoraSumParams& p) {
  __shared__ unsigned own[kLoraSumThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), token = static_cast<int>(blockIdx.x);
  const int first = (static_cast<int>(blockIdx.y) * kLoraSumThreads + thread) * kVec;
  pdl_wait();
  if (p.adapters.at(token) >= 0) {
    float sum[kVec] = {};
    if (!p.tokens.data) {
      for (int j = 0; j < p.top_k; ++j) add_lora_row<X>(p, token * p.top_k + j, first, sum);
    } else {
      for (int begin = 0; begin < p.count; begin += kLoraSumThreads) {
        const bool is_own = begin + thread < p.count && p.tokens.at(begin + thread) == token;
        const unsigned lanes = __ballot_sync(0xffffffffu, is_own);
        if (thread % 32 == 0) own[thread / 32] = lanes;
        __syncthreads();
        for (int w = 0; w < kLoraSumThreads / 32; ++w)
          for (unsigned left = own[w]; left; left &= left - 1)
            add_lora_row<X>(p, begin + w * 32 + __ffs(static_cast<int>(left)) - 1, first, sum);
        __syncthreads();
      }
    }
    if (first < p.width) {
      Out* out = static_cast<Out*>(p.out) + token * p.out_row_stride + first;
      float x[kVec];
      to_float(load<Out, kVec>(out), x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[i] += sum[i];
      Vec<Out, kVec> vec;
      from_float(x, vec);
      store(out, vec);
    }
  }
  pdl_launch_dependents();
}

}  // namespace fi
