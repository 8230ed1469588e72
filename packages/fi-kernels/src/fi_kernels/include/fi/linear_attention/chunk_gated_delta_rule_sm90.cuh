// chunk_gated_delta_rule by wgmma, on Hopper: as the kernels of mma.sync, with products of warpgroups.
#pragma once
#include "fi/linear_attention/carry_states.cuh"
#include "fi/linear_attention/chunk_products_sm90.cuh"
#include "fi/linear_attention/chunk_states.cuh"
#include "fi/linear_attention/prepare_channel_chunks.cuh"
#include "fi/linear_attention/prepare_chunks.cuh"

namespace fi {

template <class T, int kD, int kColumns, bool kChannels, int kBytes>
FI_DEVICE void chunk_gated_delta_rule_wgmma(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<ChunkStates<T, kD, kColumns, WgmmaProducts<T, kD>, kChannels>, 1024, kBytes>(p);
}
template <class T, int kD, int kColumns, bool kChannels, int kBytes>
FI_DEVICE void map_segments_wgmma(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<ChunkStates<T, kD, kColumns, WgmmaProducts<T, kD>, kChannels, true>, 1024, kBytes>(p);
}

}  // namespace fi
