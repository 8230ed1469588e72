// The rows of a warp of mqa_logits: their windows and weights, and the sum over heads of products in registers.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/cuda/states.cuh"
#include "fi/indexer/mqa_logits.h"

namespace fi {

// The keys that the rows [row, last), at most kRows, see lie in [begin, end).
template <int kRows, bool kPaged>
struct MqaLogitsWindow {
  int begin = kPaged ? 0 : 0x7fffffff, end = 0;

  FI_DEVICE MqaLogitsWindow(const MqaLogitsParams& p, int row, int last) {
    if (kPaged && !p.ends_of_rows) {
      end = p.end_of(last - 1);
      return;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= last) continue;
      const int first = kPaged ? 0 : p.begin_of(row + r);
      const int behind = kPaged ? p.within_pages(p.ends[row + r]) : p.end_in_array(row + r);
      if (first < behind) begin = min(begin, first), end = max(end, behind);
    }
  }
};

// kRows rows of kHeads heads are the columns of products whose rows are 16 keys of a warp. A lane holds accumulator
// d[i] of key lane / 4 + 8 (i / 2 % 2) and column i / 4 * 8 + lane % 4 * 2 + i % 2, as mma and wgmma leave it. Of the
// sums it stores those of one key and kOwn rows.
template <int kHeads, int kRows>
struct MqaLogitsRows {
  static constexpr int kColumns = kHeads * kRows, kSums = 2 * kRows, kOwn = kRows == 1 ? 1 : kRows / 2;
  int own;  // the first row that the lane stores, counted from the warp's first
  int begin[kOwn], end[kOwn], cleared[kOwn];
  float* logits[kOwn];
  float half_weights[kColumns / 4];  // of the lane's columns

  // row: the first of them. last: behind the last row of their tile.
  FI_DEVICE MqaLogitsRows(const MqaLogitsParams& p, int row, int last, int lane) {
    const bool upper = lane / 2 % 2;
    own = kRows > 1 && upper ? kOwn : 0;
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int mine = row + own + r;
      const bool stores = mine < last && (kRows > 1 || !upper);
      begin[r] = stores ? p.begin_of(mine) : 0;
      end[r] = stores ? p.end_of(mine) : 0;
      cleared[r] = stores && p.clean ? p.columns : 0;
      logits[r] = p.logits + mine * p.logits_stride - (p.relative ? begin[r] : 0);
    }
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int column = i / 2 * 8 + lane % 4 * 2 + i % 2, r = column / kHeads;
      half_weights[i] = row + r < last ? 0.5f * p.weights[(row + r) * p.weights_stride + column % kHeads] : 0.f;
    }
  }

  // Of accumulators to logits; seen(row, logit) gets those of keys that the row sees. Half the weight times x + |x| is
  // the weight times max(0, x): two instructions at the full rate, where max runs at half of it.
  template <int kCount, class Scale, class Seen>
  FI_DEVICE void store(const MqaLogitsParams& p, const float (&d)[kCount], int key, int lane, Scale scale_of,
                       Seen seen) const {
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
    const int of_lane = key_of(key, lane);
    const float scale = scale_of(of_lane);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int there = kRows == 1 ? 0 : kOwn + r;
      const float other = __shfl_xor_sync(0xffffffffu, upper ? mine[r] : mine[there], 2);
      put(p, r, of_lane, ((upper ? mine[there] : mine[r]) + other) * scale, seen);
    }
  }

  // No row sees the 16 keys of the warp.
  FI_DEVICE void clear(int key, int lane) const {
#pragma unroll
    for (int r = 0; r < kOwn; ++r)
      if (key_of(key, lane) < cleared[r]) logits[r][key_of(key, lane)] = -infinity();
  }

 private:
  FI_DEVICE static int key_of(int key, int lane) { return key + lane / 4 + lane % 2 * 8; }

  template <class Seen>
  FI_DEVICE void put(const MqaLogitsParams& p, int r, int key, float logit, Seen seen) const {
    const bool sees = key >= begin[r] && key < end[r];
    if (p.orders_nan && logit != logit) logit = -infinity();
    if (sees || key < cleared[r]) logits[r][key] = sees ? logit : -infinity();
    if (sees) seen(own + r, logit);
  }
};

}  // namespace fi
