// Samples rows on sm_90 that need one pass over global memory: no filter, a small top-k, or a large top-p.
#pragma once
#include "fi/sampling/cluster_sm90.cuh"
#include "fi/sampling/single_pass.cuh"
#include "fi/sampling/top_k_sampler.cuh"

namespace fi {

// Draws one token per cluster from each single-pass row; skips the others.
template <class T, int kThreads>
FI_DEVICE void sample_single_pass(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  __shared__ TopKSamplerShared<kWarps> shared;
  if (threadIdx.x == 0) shared.count = shared.quarter_count = 0;
  pdl_wait();
  pdl_launch_dependents();  // starts the kernel of the other rows, which waits only for the end of this one
  const int output = blockIdx.x / cluster_size();
  const int64_t row = input_row(p, output);
  if (skip_undrawable(p, output, row) || !is_single_pass(p, row)) return;
  extern __shared__ uint4 dynamic[];
  sample_row_single_pass<T, CtaCluster, kWarps>(
      p, reinterpret_cast<TileSum*>(dynamic), output, row,
      [&](const GlobalRow<T>& global, TileSum* tiles, int n, uint64_t random, uint32_t& lowest) {
        TopKSampler<T, kWarps> top_k{p, global, tiles, n, {}, shared};
        if (!uses_top_p_rejection(p, row) && top_k.draw(output, row, random)) return false;
        lowest = top_k.find_threshold(row);
        return true;
      });
}

}  // namespace fi
