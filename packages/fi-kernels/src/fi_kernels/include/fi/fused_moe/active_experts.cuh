// The experts that few tokens have chosen, each once, in shared memory: every CTA makes the table by itself.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/fused_moe/moe_few_tokens.h"

namespace fi {

struct ActiveExperts {
  float weights[kFewSlots][kFewTokens];      // of an active expert, of each token: the sum over the token's slots
  signed char slots[kFewSlots][kFewTokens];  // of an active expert: the first slot of each token, or -1
  int experts[kFewSlots];
  int tokens[kFewSlots];  // of an active expert: bits of the tokens
  int places[kFewSlots];  // of a slot: its place among the active experts; -1: its expert is not here
  unsigned firsts[2];     // bits of the slots that name an expert first

  // Returns the number of active experts. One token: every warp writes the same, a token's slots apart.
  FI_DEVICE int build_one(const MoeFewTokensParams& p) {
    const int lane = threadIdx.x % 32;
    int expert = -1;
    float weight = 1.f;
    if (lane < p.top_k) expert = p.ids[lane] - p.first_expert;
    if (p.weights && lane < p.top_k) weight = p.weights[lane];
    const bool here = static_cast<unsigned>(expert) < static_cast<unsigned>(p.experts);
    const unsigned all = __ballot_sync(~0u, here);
    const int at = __popc(all & ((1u << lane) - 1));
    places[lane] = here ? at : -1;
    if (here) {
      experts[at] = expert, tokens[at] = 1, weights[at][0] = weight, slots[at][0] = static_cast<signed char>(lane);
#pragma unroll
      for (int t = 1; t < kFewTokens; ++t) slots[at][t] = -1;
    }
    __syncwarp();
    return __popc(all);
  }
  // Several tokens, by all threads of the CTA: a thread has a slot. scratch: 2 * kFewSlots + experts words.
  FI_DEVICE int build(const MoeFewTokensParams& p, int* scratch) {
    const int slot = static_cast<int>(threadIdx.x), lane = slot % 32;
    int *keys = scratch, *lowest = scratch + 2 * kFewSlots;  // lowest: the first slot of an expert
    float* of_slots = reinterpret_cast<float*>(scratch + kFewSlots);
    int expert = -1, first = -1;
    if (slot < kFewSlots * kFewTokens / 4) reinterpret_cast<int*>(slots)[slot] = -1;
    if (slot < kFewSlots) {
      float weight = 1.f;
      if (slot < p.tokens * p.top_k) {
        expert = p.ids[slot] - p.first_expert;
        if (p.weights) weight = p.weights[slot];
      }
      if (static_cast<unsigned>(expert) >= static_cast<unsigned>(p.experts)) expert = -1;
      keys[slot] = expert, of_slots[slot] = weight, tokens[slot] = 0;
      if (expert >= 0) lowest[expert] = kFewSlots;
    }
    __syncthreads();
    if (expert >= 0) atomicMin(&lowest[expert], slot);
    __syncthreads();
    if (slot < kFewSlots) {
      if (expert >= 0) first = lowest[expert];
      const unsigned found = __ballot_sync(~0u, first == slot);
      if (lane == 0) firsts[slot / 32] = found;
    }
    __syncthreads();
    const unsigned low = firsts[0], high = firsts[1];
    if (slot < kFewSlots) {
      int place = -1;
      if (expert >= 0) {
        place =
            first < 32 ? __popc(low & ((1u << first) - 1)) : __popc(low) + __popc(high & ((1u << (first - 32)) - 1));
        if (first == slot) experts[place] = expert;
        const int t = slot / p.top_k;
        int at = -1;
        float sum = 0.f;
        for (int j = p.top_k - 1; j >= 0; --j)
          if (keys[t * p.top_k + j] == expert) at = t * p.top_k + j, sum += of_slots[at];
        if (at == slot) {
          slots[place][t] = static_cast<signed char>(slot), weights[place][t] = sum;
          atomicOr(&tokens[place], 1 << t);
        }
      }
      places[slot] = place;
    }
    __syncthreads();
    return __popc(low) + __popc(high);
  }
};

}  // namespace fi
