// What ranks tell each other about a dispatch and its combine.
#pragma once
#include "fi/comm/workspace.h"

namespace fi {

// In each workspace. Every word is kEmpty at first.
struct MoeControl {
  uint32_t dispatched[kMaxWorld];  // by source: number of the call + 1, once its rows are here
  uint32_t counts[kMaxWorld];      // by source: its rows
  uint32_t combinable[kMaxWorld];  // by expert rank: number of the call + 1, once its results can be read
  uint32_t totals[kMaxWorld];      // of this rank's rows, by target, summed by its CTAs
  uint32_t arrived;                // CTAs that have sent their rows
};

FI_HOST_DEVICE MoeControl* moe_control(const CommParams& p, int32_t rank, int64_t offset) {
  return reinterpret_cast<MoeControl*>(p.peers[rank] + offset);
}

}  // namespace fi
