// Lays out the shared memory with which the CTAs of a cluster search the threshold of a cached row.
#pragma once
#include "fi/sampling/candidates.cuh"

namespace fi {
namespace sampling {

template <class Cluster, int kWarps>
struct SamplerShared {
  BucketCounter counters[2][kCounters];  // buckets of a key range, above it, and all; double-buffered
  BucketTotal totals[kCounters];         // summed over the cluster
  // Bin: sampled elements in the low half, thread maxima in the high half. The last word: weight of the last bin.
  uint32_t sample_bins[kSampleBins + 1];
  uint32_t group_max[kWarps][kTileGroups];  // max key of each tile group
  uint64_t group_sum[kWarps][kTileGroups];  // weight sum of each tile group
  // Of each warp of the cluster: max key, and a key of its threads' maxima.
  uint64_t warp_max[Cluster::kMaxCtas][kWarps];
  uint64_t warp_weight[Cluster::kMaxCtas][kWarps];  // weight sum of each warp of the cluster
  uint64_t entries[kMaxCandidates];        // candidates from all CTAs: key in the high half, token in the low half
  uint32_t sent_count[Cluster::kMaxCtas];  // candidates of each CTA
  union {
    CandidateSet candidates;
    uint32_t cluster_bins[kSampleBins];  // summed over the cluster
  };
  uint64_t random;
  uint32_t sent_here;
};

// Clears the counters. Call it before the first cluster barrier.
template <class Cluster, int kWarps>
FI_DEVICE void clear(SamplerShared<Cluster, kWarps>& shared) {
  for (int b = threadIdx.x; b < 2 * kCounters; b += blockDim.x) shared.counters[0][b] = {};
  if (threadIdx.x == 0) shared.sent_here = 0;
}

}  // namespace sampling
}  // namespace fi
