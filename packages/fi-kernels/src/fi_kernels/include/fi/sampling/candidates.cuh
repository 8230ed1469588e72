// Holds a small set of candidates in shared memory, and finds thresholds and draws by comparing each with all others.
#pragma once
#include "fi/sampling/cluster.cuh"

namespace fi {
namespace sampling {

FI_DEVICE uint64_t sum_of_four_lanes(uint64_t x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// All threads of the CTA call each function, which synchronises them; n is the number of candidates.
struct CandidateSet {
  struct alignas(8) Element {
    uint32_t key, weight;  // weight: 1 while elements are counted, else the sampling weight
  };
  struct Selection {
    uint32_t key;
    uint64_t total;
  };
  Element elements[kMaxCandidates];
  int32_t tokens[kMaxCandidates];
  Selection top_k_selection, top_p_selection;
  uint32_t selected_key;

  // Calls f(i) for each candidate i, in four adjacent lanes. Whole warps take part.
  template <class F>
  FI_DEVICE static void for_each_in_four_lanes(int n, F&& f) {
#pragma unroll 1
    for (int own = threadIdx.x / 4; own < (n + 7) / 8 * 8; own += blockDim.x / 4) f(min(own, n - 1));
  }
  // Returns the largest key at which `above` plus the weights of all candidates from that key on reach `target`.
  // Returns the previous `selected_key` if no candidate reaches it.
  FI_DEVICE uint32_t select_key(int n, uint64_t above, uint64_t target) {
    for_each_in_four_lanes(n, [&](int own) {
      const uint32_t key = elements[own].key;
      uint64_t greater = 0, equal = 0;
#pragma unroll 4
      for (int i = threadIdx.x % 4; i < n; i += 4) {
        const Element other = elements[i];
        greater += other.key > key ? other.weight : 0;
        equal += other.key == key ? other.weight : 0;
      }
      greater = above + sum_of_four_lanes(greater);
      equal = sum_of_four_lanes(equal);
      if (greater < target && greater + equal >= target) selected_key = key;
    });
    __syncthreads();
    const uint32_t key = selected_key;
    __syncthreads();
    return key;
  }
  // Applies top-k, then top-p, then the bound `least`. Returns the smallest key that passes and the weight from it on.
  // The set must contain every element that can pass; it may contain more. Element weights become sampling weights.
  template <int kThreads, class Weight>
  FI_DEVICE Selection filter(int n, int32_t k, float top_p, uint32_t least, Weight&& weight) {
    constexpr int kPerThread = (kMaxCandidates * 4 + kThreads - 1) / kThreads;
    uint32_t keys[kPerThread];
    uint64_t greater[kPerThread], inclusive[kPerThread];
    if (static_cast<int>(threadIdx.x) < n) elements[threadIdx.x].weight = weight(value_of(elements[threadIdx.x].key));
    __syncthreads();
    int slot = 0;
    for_each_in_four_lanes(n, [&](int own) {
      const uint32_t key = elements[own].key;
      uint32_t counts = 0;  // low half: greater candidates; high half: equal ones
      uint64_t above = 0, equal = 0;
#pragma unroll 4
      for (int i = threadIdx.x % 4; i < n; i += 4) {
        const Element other = elements[i];
        counts += other.key > key ? 1u : other.key == key ? 1u << 16 : 0u;
        above += other.key > key ? other.weight : 0;
        equal += other.key == key ? other.weight : 0;
      }
      counts += __shfl_xor_sync(0xffffffffu, counts, 1);
      counts += __shfl_xor_sync(0xffffffffu, counts, 2);
      above = sum_of_four_lanes(above);
      equal = above + sum_of_four_lanes(equal);
      const int greater_count = counts & 0xffff, not_less_count = greater_count + (counts >> 16);
      if (greater_count < k && not_less_count >= min(k, n)) top_k_selection = {key, equal};
#pragma unroll
      for (int o = 0; o < kPerThread; ++o)
        if (o == slot) keys[o] = key, greater[o] = above, inclusive[o] = equal;
      ++slot;
    });
    __syncthreads();
    Selection selection = top_k_selection;
    if (top_p < 1.f) {
      const uint64_t target = top_p_target(selection.total, top_p);
#pragma unroll
      for (int o = 0; o < kPerThread; ++o)
        if (o < slot && keys[o] >= selection.key && greater[o] < target && inclusive[o] >= target)
          top_p_selection = {keys[o], inclusive[o]};
      __syncthreads();
      selection = top_p_selection;
    }
    if (selection.key < least) {
      selection = {least, 0};
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < n; i += 32)
        selection.total += elements[i].key >= least ? elements[i].weight : 0;
      selection.total = warp_sum_u64(selection.total);
    }
    return selection;
  }
  // Inverts the CDF in the order of tokens: the threads that find the token at which the weight from `lowest` on
  // exceeds `target` return it, the others return -1.
  FI_DEVICE int draw(int n, uint32_t lowest, uint64_t target) const {
    int token = -1;
    for_each_in_four_lanes(n, [&](int own) {
      uint64_t before = 0;
#pragma unroll 4
      for (int i = threadIdx.x % 4; i < n; i += 4)
        before += tokens[i] < tokens[own] && elements[i].key >= lowest ? elements[i].weight : 0;
      before = sum_of_four_lanes(before);
      if (elements[own].key >= lowest && before <= target && target < before + elements[own].weight)
        token = tokens[own];
    });
    return token;
  }
};

}  // namespace sampling
}  // namespace fi
