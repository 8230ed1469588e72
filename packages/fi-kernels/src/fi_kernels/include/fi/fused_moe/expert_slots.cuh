// Few slots (a token and one of its experts): each CTA sorts them in shared memory, and the warp that completes
// features of the second product sums them over the experts of each token.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/fused_moe/expert_passes.cuh"

namespace fi {

struct SlotTable {
  int experts[kMaxSlots], tokens[kMaxSlots];  // of rows: slots sorted by expert, stably
  int positions[kMaxSlots];                   // of slots: the row, or -1 if the expert is not here
  float weights[kMaxSlots];                   // of slots
  alignas(16) int keys[kMaxSlots];            // of slots: in their order

  // The same rows as those of moe_sort, and their passes. By one warp; a barrier of the CTA comes after.
  template <int kTokens>
  FI_DEVICE void build(ExpertPasses& passes, const ExpertSlots& slots, int local_experts) {
    static_assert(kMaxSlots == 64, "two slots a lane");
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    int key[2], row[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int slot = h * 32 + lane;
      weights[slot] = slot < slots.count && slots.weights ? slots.weights[slot] : 1.f;
      const int expert = slot < slots.count ? slots.ids[slot] - slots.first_expert : -1;
      key[h] = expert >= 0 && expert < local_experts ? expert * kMaxSlots + slot : 0x7fffffff;
    }
    // Keys in shared memory, four at a time: shuffles took 2 us of 64 slots.
    keys[lane] = key[0];
    keys[lane + 32] = key[1];
    __syncwarp();
#pragma unroll 4
    for (int slot = 0; slot < slots.count; slot += 4) {
      const int4 others = *reinterpret_cast<const int4*>(keys + slot);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        row[h] += (others.x < key[h]) + (others.y < key[h]) + (others.z < key[h]) + (others.w < key[h]);
    }
    const int rows =
        __popc(__ballot_sync(kAll, key[0] != 0x7fffffff)) + __popc(__ballot_sync(kAll, key[1] != 0x7fffffff));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int slot = h * 32 + lane;
      const bool here = key[h] != 0x7fffffff;
      positions[slot] = here ? row[h] : -1;
      if (here) experts[row[h]] = key[h] / kMaxSlots, tokens[row[h]] = slot / slots.top_k;
    }
    __syncwarp();
    // Rows at which an expert begins, then those at which a pass does.
    uint64_t firsts = 0, begins = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = h * 32 + lane;
      const bool first = r < rows && (r == 0 || experts[r] != experts[r - 1]);
      firsts |= static_cast<uint64_t>(__ballot_sync(kAll, first)) << h * 32;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = h * 32 + lane, first = 63 - __clzll(firsts & ((2ull << r) - 1));
      begins |= static_cast<uint64_t>(__ballot_sync(kAll, r < rows && (r - first) % kTokens == 0)) << h * 32;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = h * 32 + lane;
      if (!(begins >> r & 1)) continue;
      const uint64_t after = begins & ~((2ull << r) - 1);
      const int end = after ? __ffsll(static_cast<long long>(after)) - 1 : rows;
      passes.passes[__popcll(begins & ((1ull << r) - 1))] = {r, static_cast<short>(experts[r]),
                                                             static_cast<short>(end - r)};
    }
    if (lane == 0) passes.count = __popcll(begins);
  }
};

template <class T>
FI_DEVICE const unsigned* pair_at(const void* from, int64_t element) {
  return reinterpret_cast<const unsigned*>(static_cast<const T*>(from) + element);
}

// sum[t, f] for all tokens and the 16 features of the rows of weights from `row` on: the sum over the slots of a token,
// in order, of weight * (row[f] + bias[f]), as moe_finalize computes it. By a warp.
template <class T>
FI_DEVICE void sum_slots(const ExpertSlots& slots, const SlotTable& table, const ExpertGemm& g, int row) {
  constexpr int kPairs = 8, kBatch = 8;
  const int feature = feature_of_row(row, g.order.step), step = max(2, g.order.step);
  const int items = slots.count / slots.top_k * kPairs;
  for (int item = static_cast<int>(threadIdx.x) % 32; item < items; item += 32) {
    const int token = item / kPairs, at = feature + item % kPairs * step;
    if (at >= g.features) continue;
    float x = 0.f, y = 0.f;
    for (int first = 0; first < slots.top_k; first += kBatch) {
      unsigned pairs[kBatch], bias[kBatch];
      bool here[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {  // all loads in flight together
        const int of = first + j < slots.top_k ? table.positions[token * slots.top_k + first + j] : -1;
        here[j] = of >= 0;
        pairs[j] = bias[j] = 0;
        if (here[j]) pairs[j] = __ldcg(pair_at<T>(g.out, of * g.out_row_stride + at));
        if (here[j] && slots.bias) bias[j] = *pair_at<T>(slots.bias, table.experts[of] * slots.bias_row_stride + at);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float weight = table.weights[min(token * slots.top_k + first + j, kMaxSlots - 1)];
        const T *pair = reinterpret_cast<const T*>(&pairs[j]), *of_bias = reinterpret_cast<const T*>(&bias[j]);
        x = here[j] ? fmaf(weight, to_float(pair[0]) + to_float(of_bias[0]), x) : x;
        y = here[j] ? fmaf(weight, to_float(pair[1]) + to_float(of_bias[1]), y) : y;
      }
    }
    const T out[2] = {from_float<T>(x), from_float<T>(y)};
    *reinterpret_cast<unsigned*>(static_cast<T*>(slots.sum) + token * slots.sum_row_stride + at) =
        reinterpret_cast<const unsigned&>(out);
  }
}

// Without local experts the sums are zeros. By `threads` threads of all CTAs.
template <class T>
FI_DEVICE void zero_sums(const ExpertSlots& slots, const ExpertGemm& g, int threads) {
  const int pairs = g.features / 2, all = slots.count / slots.top_k * pairs;
  for (int i = blockIdx.x * threads + threadIdx.x; i < all; i += gridDim.x * threads)
    *reinterpret_cast<unsigned*>(static_cast<T*>(slots.sum) + i / pairs * slots.sum_row_stride + i % pairs * 2) = 0;
}

}  // namespace fi
