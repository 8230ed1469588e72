// ssd_combined by wgmma, on Hopper: as the kernels of mma.sync, with products of warpgroups.
#pragma once
#include "fi/linear_attention/chunk_products_sm90.cuh"
#include "fi/linear_attention/ssd_states.cuh"

namespace fi {

template <class T, int kD, int kColumns, bool kCheckpoints, bool kPair, int kStages, int kBytes>
FI_DEVICE void ssd_states_wgmma(const SsdCombinedParams& p) {
  run_in_shared<SsdStates<T, kD, kColumns, WgmmaProducts<T, kD, kStages>, kCheckpoints, kPair, kStages>, 1024, kBytes>(
      p);
}

}  // namespace fi
