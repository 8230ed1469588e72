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
  Element elements[kFew];
  int32_t tokens[kFew];
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
  // Those from `lowest` on get their weights, the others none. Returns the sum.
  template <class Weight>
  FI_DEVICE uint64_t weigh(int n, uint32_t lowest, Weight&& weight) {
    if (static_cast<int>(threadIdx.x) < n) {
      Element& own = elements[threadIdx.x];
      own.part = own.key >= lowest ? weight(value_of(own.key)) : 0u;
    }
    __syncthreads();
    uint64_t sum = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < n; i += 32) sum += elements[i].part;
    return warp_sum_u64(sum);
  }
  // The smallest key that passes both filters, among all elements that may and perhaps more; their parts are one.
  template <class Weight>
  FI_DEVICE uint32_t choose(int n, int32_t k, float top_p, Weight&& weight) {
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    const uint32_t key = settle(n, 0, k);
    return top_p < 1.f ? settle(n, 0, share_of(weigh(n, key, weight), top_p)) : key;
  }
  // The token at which the weights, summed in the order of tokens, pass target: the threads that find it return it.
  FI_DEVICE int draw(int n, uint64_t target) const {
    int token = -1;
    by_four(n, [&](int own) {
      uint64_t before = 0;
#pragma unroll 4
      for (int i = threadIdx.x % 4; i < n; i += 4) before += tokens[i] < tokens[own] ? elements[i].part : 0;
      before = sum_of_four(before);
      if (before <= target && target < before + elements[own].part) token = tokens[own];
    });
    return token;
  }
};

}  // namespace sampling
}  // namespace fi
