// concat_mla_k on sm_80 and later: one CTA per token.
#pragma once
#include "fi/concat_ops/concat_mla_k.h"
#include "fi/cuda/vec.cuh"

namespace fi {

template <int kBytes>
FI_DEVICE void concat_mla_k(const ConcatMlaKParams& p) {
  // 12 loads in flight with streamed accesses are 7 % above a copy, fewer are slower (docs/notes/mla-concat.md).
  constexpr int kLoadsInFlight = 12;
  const int64_t token = blockIdx.x;
  const char* nope = p.k_nope + token * p.nope_token;
  const char* rope = p.k_rope + token * p.rope_token;
  char* k = p.k + token * p.k_token;
  pdl_wait();
#pragma unroll 1
  for (int first = threadIdx.x; first < p.vectors; first += kLoadsInFlight * blockDim.x) {
    Vec<uint8_t, kBytes> x[kLoadsInFlight];
    int64_t to[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int at = first + i * blockDim.x;
      const int head = divide(at, p.width), column = at - head * static_cast<int>(p.width.value);
      to[i] = head * p.k_head + column * kBytes;
      if (at >= p.vectors) continue;
      const bool shared = column >= p.nope;  // by all heads
      const char* from = shared ? rope + (column - p.nope) * kBytes : nope + head * p.nope_head + column * kBytes;
      x[i] = load_streamed<uint8_t, kBytes>(reinterpret_cast<const uint8_t*>(from), shared);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i)
      if (first + i * static_cast<int>(blockDim.x) < p.vectors)
        store_streamed(reinterpret_cast<uint8_t*>(k + to[i]), x[i]);
  }
  pdl_launch_dependents();
}

}  // namespace fi
