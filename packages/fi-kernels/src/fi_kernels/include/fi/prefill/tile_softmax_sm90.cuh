// Mask and softmax of a tile of scores that wgmma has computed: a thread has those of two rows, `row` and row + 8.
#pragma once
#include "fi/attention/softmax.h"
#include "fi/cuda/ptx/math.cuh"
#include "fi/prefill/producers_sm90.cuh"

namespace fi {

// Hides what the mask does not leave of keys from `column` on.
template <int kScores>
FI_DEVICE void hide_keys(const BatchPrefillParams& p, float (&s)[kScores], const Work& work, int row, int column) {
  const Mask mask = Mask::of_range(p.causal, p.window_left, work.request.qo_len, work.request.kv_len);
  int first[2], end[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = work.token + static_cast<int>(divide(row + 8 * h, p.group));
    first[h] = mask.first_key(token) - column;
    end[h] = mask.end_key(token) - column;
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int key = i / 4 * 8 + i % 2, h = i / 2 % 2;
    if (key < first[h] || key >= end[h]) s[i] = kMinusInf;
  }
}

// Scores become weights times 2^offset, relative to the new maxima m; alpha is what earlier sums must be multiplied by.
// A maximum that is no more than `room` above m leaves m as it is, and alpha 1. d holds this thread's part of the sum.
template <int kScores>
FI_DEVICE void tile_softmax(float (&s)[kScores], const float (&scales)[2], float offset, float room, float (&m)[2],
                            float (&d)[2], float (&alpha)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float scale = scales[h];
    float most[4] = {m[h], kMinusInf, kMinusInf, kMinusInf};  // chains that need not wait for each other
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      most[i % 2] = fmaxf(most[i % 2], s[4 * i + 2 * h]);
      most[2 + i % 2] = fmaxf(most[2 + i % 2], s[4 * i + 2 * h + 1]);
    }
    float top = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const bool kept = top <= m[h] + room;
    if (kept) top = m[h];
    const float base = softmax_base(top) * scale;
    // Of equal maxima the exponential comes near to 1, not to it: one product of the two differences is rounded.
    alpha[h] = kept ? 1.f : exp2_approx(fmaf(m[h], scale, -base));
    m[h] = top;
    const float less = base - offset;
    float sum = 0.f, sum1 = 0.f;
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      float& x = s[4 * i + 2 * h];
      float& y = s[4 * i + 2 * h + 1];
      x = exp2_approx(fmaf(x, scale, -less));
      y = exp2_approx(fmaf(y, scale, -less));
      sum += x;
      sum1 += y;
    }
    d[h] = d[h] * alpha[h] + (sum + sum1);
  }
}

}  // namespace fi
