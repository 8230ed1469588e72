// The rows of a warp of mqa_logits: their windows and weights, and the sum over heads of products in registers.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/cuda/states.cuh"
#include "fi/indexer/mqa_logits.h"

namespace fi {

// kRows rows of kHeads heads are the columns of products whose rows are 16 keys of a warp. A lane holds accumulator
// d[i] of key lane / 4 + 8 (i / 2 % 2) and column i / 4 * 8 + lane % 4 * 2 + i % 2, as mma and wgmma leave it.
template <int kHeads, int kRows>
struct MqaLogitsRows {
  static constexpr int kColumns = kHeads * kRows, kSums = 2 * kRows;
  int row0, begin[kRows], end[kRows];
  float half_weights[kColumns / 4];  // of the lane's columns

  // row: the first of them. last: behind the last row of their tile.
  FI_DEVICE MqaLogitsRows(const MqaLogitsParams& p, int row, int last, int lane) : row0(row) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool exists = row + r < last;
      begin[r] = exists ? p.begin_of(row + r) : 0;
      end[r] = exists ? p.end_of(row + r) : -1;
    }
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int column = i / 2 * 8 + lane % 4 * 2 + i % 2, r = column / kHeads;
      half_weights[i] = row + r < last ? 0.5f * p.weights[(row + r) * p.weights_stride + column % kHeads] : 0.f;
    }
  }

  // The key behind the last one that a row sees.
  FI_DEVICE int last_key() const {
    int last = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) last = max(last, end[r]);
    return last;
  }
  // Whether a row sees one of these keys.
  FI_DEVICE bool meets(int key, int count) const {
    bool found = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) found |= key < end[r] && key + count > begin[r];
    return found;
  }

  // Of accumulators to logits. Half the weight times x + |x| is the weight times max(0, x): two instructions at the
  // full rate, where max runs at half of it.
  template <int kCount, class Scale>
  FI_DEVICE void store(const MqaLogitsParams& p, const float (&d)[kCount], int key, int lane, Scale scale_of) const {
    static_assert(kCount == kColumns / 2);
    float sums[kSums];
#pragma unroll
    for (float& sum : sums) sum = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = i / 4 * 8 / kHeads, half = i / 2 % 2;
      sums[half * kRows + r] = fmaf(d[i] + fabsf(d[i]), half_weights[i / 4 * 2 + i % 2], sums[half * kRows + r]);
    }
    // Four lanes share a key: each gets the sums of another half of it, or of other rows.
    const bool odd = lane % 2, upper = lane / 2 % 2;
    float mine[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float other = __shfl_xor_sync(0xffffffffu, odd ? sums[r] : sums[kRows + r], 1);
      mine[r] = (odd ? sums[kRows + r] : sums[r]) + other;
    }
    const int own = key + lane / 4 + (odd ? 8 : 0);
    const float scale = scale_of(own);
    if constexpr (kRows == 1) {
      mine[0] += __shfl_xor_sync(0xffffffffu, mine[0], 2);
      if (!upper) put(p, 0, own, mine[0] * scale);
    } else {
      constexpr int kEach = kRows / 2;
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const float other = __shfl_xor_sync(0xffffffffu, upper ? mine[r] : mine[kEach + r], 2);
        const float sum = ((upper ? mine[kEach + r] : mine[r]) + other) * scale;
        if (upper)
          put(p, kEach + r, own, sum);
        else
          put(p, r, own, sum);
      }
    }
  }

  // No row sees the 16 keys of the warp.
  FI_DEVICE void clear(const MqaLogitsParams& p, int key, int lane) const {
    if (!p.clean || lane >= 16) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) put(p, r, key + lane, -infinity());
  }

 private:
  FI_DEVICE void put(const MqaLogitsParams& p, int r, int key, float logit) const {
    if (end[r] < 0) return;
    float* to = p.logits + static_cast<int64_t>(row0 + r) * p.logits_stride;
    const bool sees = key >= begin[r] && key < end[r];
    if (p.orders_nan && logit != logit) logit = -infinity();
    if (p.relative) {
      if (sees) to[key - begin[r]] = logit;
    } else if (key < p.columns && (sees || p.clean)) {
      to[key] = sees ? logit : -infinity();
    }
  }
};

}  // namespace fi
