// Brings the results of experts back to the ranks of the tokens over the GPUs of a host, and adds them.
#pragma once
#include "fi/comm/exchange.cuh"
#include "fi/comm/moe_combine.h"
#include "fi/comm/reduced_row.cuh"

namespace fi {

// 256 threads; a CTA adds the rows of one token after another.
template <class T>
FI_DEVICE void moe_combine(const MoeCombineParams& p) {
  const CommParams& c = p.comm;
  pdl_wait();
  Exchange exchange(c);
  const int rank = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0) {
    exchange.announce();
    if (rank < c.world && rank != c.rank && !exchange.failed)
      store_flag(&moe_control(c, rank, p.control_offset)->combinable[c.rank], exchange.epoch + 1);
  }
  if (rank < c.world && rank != c.rank) {
    const uint32_t* flag = &moe_control(c, c.rank, p.control_offset)->combinable[rank];
    PollLimit limit;
    while (!exchange.failed && load_flag(flag) != exchange.epoch + 1)
      exchange.failed = !limit.allows(c, exchange.rotation(), rank);
  }
  exchange.failed = __syncthreads_or(exchange.failed);
  for (int token = static_cast<int>(blockIdx.x); token < p.tokens; token += static_cast<int>(gridDim.x)) {
    const uint4* from[kMaxWorld];
#pragma unroll
    for (int r = 0; r < kMaxWorld; ++r) {
      const int row = r < c.world ? p.rows[static_cast<int64_t>(token) * kMaxWorld + r] : -1;
      from[r] = row < 0 ? nullptr
                        : reinterpret_cast<const uint4*>(c.peers[r] + p.offset) +
                              (static_cast<int64_t>(c.rank) * p.max_tokens + row) * p.vectors;
    }
    for (int i = static_cast<int>(threadIdx.x); i < p.vectors; i += static_cast<int>(blockDim.x)) {
      uint4 x[kMaxWorld];
#pragma unroll
      for (int r = 0; r < kMaxWorld; ++r)
        x[r] = from[r] && !exchange.failed ? load_system(from[r] + i) : make_uint4(0, 0, 0, 0);
      float sum[ReducedRow<T>::kVec] = {};
#pragma unroll
      for (int r = 0; r < kMaxWorld; ++r)
        if (from[r]) ReducedRow<T>::add(x[r], sum);
      uint4 words;
      ReducedRow<T>::to_words(sum, words);
      if (exchange.failed) words = make_uint4(~0u, ~0u, ~0u, ~0u);
      store_global(static_cast<uint4*>(p.out) + static_cast<int64_t>(token) * p.vectors + i, words);
    }
  }
  if (blockIdx.x == 0) exchange.compare();
  exchange.finish(0);
}

}  // namespace fi
