// ssd_combined by mma.sync, on sm_80 and later: one kernel prepares all chunks in parallel, another goes through the
// chunks of a sequence.
#pragma once
#include "fi/linear_attention/chunk_products.cuh"
#include "fi/linear_attention/ssd_states.cuh"

namespace fi {

template <class T, int kD, int kColumns, bool kCheckpoints, int kBytes>
FI_DEVICE void ssd_states(const SsdCombinedParams& p) {
  run_in_shared<SsdStates<T, kD, kColumns, MmaProducts<T, kD>, kCheckpoints, false, 2>, 128, kBytes>(p);
}

}  // namespace fi
