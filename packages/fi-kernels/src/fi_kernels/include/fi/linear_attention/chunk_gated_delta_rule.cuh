// chunk_gated_delta_rule by mma.sync, on sm_80 and later: one kernel prepares all chunks in parallel, another goes
// through the chunks of a sequence. Segments of a sequence are mapped in parallel, and their states carried, in
// between.
#pragma once
#include "fi/linear_attention/carry_states.cuh"
#include "fi/linear_attention/chunk_products.cuh"
#include "fi/linear_attention/chunk_states.cuh"
#include "fi/linear_attention/prepare_channel_chunks.cuh"
#include "fi/linear_attention/prepare_chunks.cuh"

namespace fi {

template <class T, int kD, int kColumns, bool kChannels, int kBytes>
FI_DEVICE void chunk_gated_delta_rule(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<ChunkStates<T, kD, kColumns, MmaProducts<T, kD>, kChannels>, 128, kBytes>(p);
}
template <class T, int kD, int kColumns, bool kChannels, int kBytes>
FI_DEVICE void map_segments(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<ChunkStates<T, kD, kColumns, MmaProducts<T, kD>, kChannels, true>, 128, kBytes>(p);
}

}  // namespace fi
