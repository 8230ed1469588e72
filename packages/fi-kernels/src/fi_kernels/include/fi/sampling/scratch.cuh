// What the blocks of a team keep in shared memory while they look for a threshold in rows that they hold.
#pragma once
#include "fi/sampling/few.cuh"

namespace fi {
namespace sampling {

template <class Team, int kWarps>
struct Scratch {
  Counter counters[2][kCounters];  // by bucket of a range of keys, above it, and of all; used in turns
  Total totals[kCounters];         // over the team
  uint32_t sample[kSteps +
                  1];  // by size: elements of a sample, and largest of threads in the upper half; weight of the rest
  uint32_t peak[kWarps][kPeaks];             // keys of the largest elements of a warp's pieces
  uint64_t sums[kWarps][kPeaks];             // their weights
  uint64_t ends[Team::kLargest][kWarps];     // of each warp of the team: key of the largest, and of a thread's largest
  uint64_t weights[Team::kLargest][kWarps];  // of each warp of the team
  uint64_t entries[kFew];                    // elements that other blocks sent: key, token
  uint32_t sent[Team::kLargest];             // how many
  union {
    FewElements few;
    uint32_t sampled[kSteps];  // over the team
  };
  uint64_t random;
  uint32_t mine;
};

// Before the team's first sync.
template <class Team, int kWarps>
FI_DEVICE void clear(Scratch<Team, kWarps>& shared) {
  for (int b = threadIdx.x; b < 2 * kCounters; b += blockDim.x) shared.counters[0][b] = {};
  if (threadIdx.x == 0) shared.mine = 0;
}

}  // namespace sampling
}  // namespace fi
