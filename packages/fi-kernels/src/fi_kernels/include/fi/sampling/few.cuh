// A few elements of a row in the shared memory of a block: thresholds and draws by comparing each with all others.
#pragma once
#include "fi/sampling/team.cuh"

namespace fi {
namespace sampling {

FI_DEVICE uint64_t sum_of_four(uint64_t x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The functions are of the whole block, whose other barriers they share; n is the number of elements.
struct FewElements {
  struct alignas(8) Element {
    uint32_t key, part;  // part: one, or the weight
  };
  struct Chosen {
    uint32_t key;
    uint64_t total;
  };
  Element elements[kFew];
  int32_t tokens[kFew];
  Chosen by_count, by_weight;
  uint32_t found;

  // f(i) for the i-th element, by four threads each, in whole warps.
  template <class F>
  FI_DEVICE static void by_four(int n, F&& f) {
#pragma unroll 1
    for (int own = threadIdx.x / 4; own < (n + 7) / 8 * 8; own += blockDim.x / 4) f(min(own, n - 1));
  }
  // The key with which `above` and the parts from the largest on reach the target; what was in `found` if none does.
  FI_DEVICE uint32_t settle(int n, uint64_t above, uint64_t target) {
    by_four(n, [&](int own) {
      const uint32_t key = elements[own].key;
      uint64_t greater = 0, equal = 0;
#pragma unroll 4
      for (int i = threadIdx.x % 4; i < n; i += 4) {
        const Element other = elements[i];
        greater += other.key > key ? other.part : 0;
        equal += other.key == key ? other.part : 0;
      }
      greater = above + sum_of_four(greater);
      equal = sum_of_four(equal);
      if (greater < target && greater + equal >= target) found = key;
    });
    __syncthreads();
    const uint32_t key = found;
    __syncthreads();
    return key;
  }
  // The smallest key that passes both filters and `least`, among all elements that may and perhaps more, and the sum of
  // weights from it on; parts become weights.
  template <int kThreads, class Weight>
  FI_DEVICE Chosen choose(int n, int32_t k, float top_p, uint32_t least, Weight&& weight) {
    constexpr int kOwn = (kFew * 4 + kThreads - 1) / kThreads;
    uint32_t keys[kOwn];
    uint64_t greater[kOwn], through[kOwn];
    if (static_cast<int>(threadIdx.x) < n) elements[threadIdx.x].part = weight(value_of(elements[threadIdx.x].key));
    __syncthreads();
    int turn = 0;
    by_four(n, [&](int own) {
      const uint32_t key = elements[own].key;
      uint32_t counts = 0;  // of greater ones, and from 2^16 on of others as large
      uint64_t above = 0, equal = 0;
#pragma unroll 4
      for (int i = threadIdx.x % 4; i < n; i += 4) {
        const Element other = elements[i];
        counts += other.key > key ? 1u : other.key == key ? 1u << 16 : 0u;
        above += other.key > key ? other.part : 0;
        equal += other.key == key ? other.part : 0;
      }
      counts += __shfl_xor_sync(0xffffffffu, counts, 1);
      counts += __shfl_xor_sync(0xffffffffu, counts, 2);
      above = sum_of_four(above);
      equal = above + sum_of_four(equal);
      const int more = counts & 0xffff, as_many = more + (counts >> 16);
      if (more < k && as_many >= min(k, n)) by_count = {key, equal};
#pragma unroll
      for (int o = 0; o < kOwn; ++o)
        if (o == turn) keys[o] = key, greater[o] = above, through[o] = equal;
      ++turn;
    });
    __syncthreads();
    Chosen chosen = by_count;
    if (top_p < 1.f) {
      const uint64_t target = share_of(chosen.total, top_p);
#pragma unroll
      for (int o = 0; o < kOwn; ++o)
        if (o < turn && keys[o] >= chosen.key && greater[o] < target && through[o] >= target)
          by_weight = {keys[o], through[o]};
      __syncthreads();
      chosen = by_weight;
    }
    if (chosen.key < least) {
      chosen = {least, 0};
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < n; i += 32) chosen.total += elements[i].key >= least ? elements[i].part : 0;
      chosen.total = warp_sum_u64(chosen.total);
    }
    return chosen;
  }
  // The token at which the weights from a key on, summed in the order of tokens, pass target: the threads that find it
  // return it, the others -1.
  FI_DEVICE int draw(int n, uint32_t lowest, uint64_t target) const {
    int token = -1;
    by_four(n, [&](int own) {
      uint64_t before = 0;
#pragma unroll 4
      for (int i = threadIdx.x % 4; i < n; i += 4)
        before += tokens[i] < tokens[own] && elements[i].key >= lowest ? elements[i].part : 0;
      before = sum_of_four(before);
      if (elements[own].key >= lowest && before <= target && target < before + elements[own].part) token = tokens[own];
    });
    return token;
  }
};

}  // namespace sampling
}  // namespace fi
