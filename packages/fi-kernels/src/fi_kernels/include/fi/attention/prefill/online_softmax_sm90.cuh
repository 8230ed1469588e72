// Mask and online softmax of a wgmma score tile: a thread holds two rows, `row` and row + 8.
#pragma once
#include "fi/attention/prefill/tma_producer_sm90.cuh"
#include "fi/attention/softmax.h"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/math.cuh"

namespace fi {

// Sets scores of masked keys to -inf; `column` is the key of the thread's first score, counted from work.origin. left,
// right: whether keys before a window, and keys behind the last visible one, are among them.
template <int kScores>
FI_DEVICE void apply_mask(const BatchPrefillParams& p, float (&s)[kScores], const WorkTile& work, int row, int column,
                          bool left, bool right) {
  const Mask mask =
      Mask::of_range(p.problem.mask.causal, p.problem.mask.window_left, work.request.qo_len, work.request.kv_len);
  column += work.origin;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = work.token + static_cast<int>(divide(row + 8 * h, p.problem.group_size));
    if (right) {
      const int end = mask.end_key(token) - column;
#pragma unroll
      for (int i = 2 * h; i < kScores; i += i % 2 == 0 ? 1 : 3)
        if (i / 4 * 8 + i % 2 >= end) s[i] = kMinusInf;
    }
    if (left) {
      const int first = mask.first_key(token) - column;
#pragma unroll
      for (int i = 2 * h; i < kScores; i += i % 2 == 0 ? 1 : 3)
        if (i / 4 * 8 + i % 2 < first) s[i] = kMinusInf;
    }
  }
}

// Replaces the scores of row h by 2^(scale * s - less). Returns their sum.
template <int kScores>
FI_DEVICE float exponentials(float (&s)[kScores], int h, float scale, float less) {
  float even = 0.f, odd = 0.f;  // independent chains
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
    float& x = s[4 * i + 2 * h];
    float& y = s[4 * i + 2 * h + 1];
    x = exp2_approx(fmaf(x, scale, -less));
    y = exp2_approx(fmaf(y, scale, -less));
    even += x;
    odd += y;
  }
  return even + odd;
}

// Probabilities are relative to row_max (a score times its scale), which is raised only when they come out too large.
// So the maximum of a KV tile need not be known before its probabilities are computed.

// Replaces scores by 2^(scale * s - row_max + offset) with the current row_max. In a row that has seen no key, masked
// keys become 0 and others infinite.
template <int kScores>
FI_DEVICE void softmax_keep_max(float (&s)[kScores], const float (&scales)[2], float offset, const float (&row_max)[2],
                                float (&sums)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) sums[h] = exponentials(s, h, scales[h], fmaxf(row_max[h], -3e38f) - offset);
}

// The same after row_max has become the maximum of the row, except where `kept` is true. alpha: the factor that
// rescales earlier sums. row_sum: this thread's part of the sum.
template <int kScores>
FI_DEVICE void online_softmax(float (&s)[kScores], const float (&scales)[2], float offset, const bool (&kept)[2],
                              float (&row_max)[2], float (&row_sum)[2], float (&alpha)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most[4] = {kMinusInf, kMinusInf, kMinusInf, kMinusInf};  // independent chains
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      most[i % 2] = fmaxf(most[i % 2], s[4 * i + 2 * h]);
      most[2 + i % 2] = fmaxf(most[2 + i % 2], s[4 * i + 2 * h + 1]);
    }
    float top = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scales[h];
    top = kept[h] ? row_max[h] : fmaxf(row_max[h], top);
    const float base = softmax_reference(top);
    alpha[h] = exp2_approx(row_max[h] - base);
    row_max[h] = top;
    row_sum[h] = row_sum[h] * alpha[h] + exponentials(s, h, scales[h], base - offset);
  }
}

// Whether a condition is true in all four threads of a row.
FI_DEVICE bool all_of_quad(bool x) {
  const unsigned threads = __ballot_sync(0xffffffffu, x);
  return (threads >> (threadIdx.x % 32 & ~3u) & 15u) == 15u;
}

// Scales by head and on the device, of fp8 keys and values. The factor of the scores of a row:
FI_DEVICE float row_scale(const BatchPrefillParams& p, int kv_head, int row) {
  float scale = p.copies.scores.scale;
  const int group = p.problem.group_size.value,
            head = kv_head * group + row - static_cast<int>(divide(row, p.problem.group_size)) * group;
  if (p.problem.scale_q) scale *= p.problem.scale_q[head];
  if (p.problem.scale_k) scale *= p.problem.scale_k[kv_head];
  if (p.scales.bmm1) scale *= *p.scales.bmm1;
  return scale;
}
// The factor of the output.
FI_DEVICE float value_scale(const BatchPrefillParams& p, int kv_head) {
  return (p.problem.scale_v ? p.problem.scale_v[kv_head] : 1.f) * (p.scales.bmm2 ? *p.scales.bmm2 : 1.f);
}
// 16 bits each, of an output of fp16 or bf16.
FI_DEVICE unsigned pack_output(const BatchPrefillParams& p, float low, float high) {
  return p.problem.out_type == OutType::kF16 ? pack_pair(low, high, __half()) : pack_pair(low, high, __nv_bfloat16());
}

// The epilogue of a row, in all four of its threads: where its output begins, and the factor of the unnormalised
// output. The first thread stores the LSE.
struct RowEpilogue {
  bool exists;
  int64_t begin;
  float factor;

  FI_DEVICE RowEpilogue(const BatchPrefillParams& p, const WorkTile& work, int row, float offset, float row_max,
                        float row_sum) {
    const int group = static_cast<int>(p.problem.group_size.value), token = divide(row, p.problem.group_size);
    const int head = work.kv_head * group + row - token * group;
    const int64_t at = work.request.qo_begin + work.token + token;
    exists = token < work.tokens;
    begin = at * p.problem.out_token + head * p.problem.out_head;
    factor = p.problem.out_scale;
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
    if (p.scales.sinks && exists) {
      const float sink = p.scales.sinks[head] * kLog2e, top = fmaxf(row_max, sink);
      row_sum = row_sum * exp2_approx(row_max - top) + exp2_approx(sink - top + offset);
      factor *= exp2_approx(row_max - top);
      row_max = top;
    }
    factor *= inverse_row_sum(row_sum);
    if (p.problem.lse && threadIdx.x % 4 == 0 && exists)
      p.problem.lse[at * p.problem.qo_heads + head] = softmax_lse<CudaMath>(row_max - offset, row_sum);
  }
};

}  // namespace fi
