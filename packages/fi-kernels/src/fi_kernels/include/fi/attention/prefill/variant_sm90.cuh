// A user's attention variant in the Hopper prefill kernel: scores of a KV tile, and the end of a row.
#pragma once
#include "fi/attention/prefill/tma_producer_sm90.cuh"
#include "fi/attention/softmax.h"
#include "fi/attention/variant.h"
#include "fi/cuda/exchange.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/global.cuh"

namespace fi {

// A packed row of a work tile.
FI_DEVICE Row row_of(const BatchPrefillParams& p, const WorkTile& work, int row) {
  const int group = static_cast<int>(p.problem.group_size.value), token = divide(row, p.problem.group_size);
  return {work.token + token, work.kv_head * group + row - token * group};
}

// kSome: rows may not exist, or may not see a key. A thread holds rows `row` and row + 8; `column` is the key of its
// first score.
template <bool kSome, int kScores>
FI_DEVICE void score_rows(const BatchPrefillParams& p, const Mask& mask, const WorkTile& work, Variant& variant,
                          int row, int column, float (&s)[kScores]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Row at = row_of(p, work, row + 8 * h);
    const int first = mask.first_key(at.i), end = at.i < work.token + work.tokens ? mask.end_key(at.i) : first;
#pragma unroll
    for (int i = 2 * h; i < kScores; i += i % 2 == 0 ? 1 : 3) {
      const int key = column + i / 4 * 8 + i % 2;
      s[i] = !kSome || (key >= first && key < end) ? variant.score(s[i], at, work.kv_head, key) : Variant::kHidden;
    }
  }
}

// Replaces products by scores, for the keys that each row sees. `key` is the first of the KV tile, counted from
// work.origin, and `masked` is true if some row of the warpgroup does not see all of them.
template <int kScores>
FI_DEVICE void score_by_variant(const BatchPrefillParams& p, const Variant::Arguments& arguments, const WorkTile& work,
                                int row, int group, int key, bool masked, float (&s)[kScores]) {
  const Mask mask =
      Mask::of_range(p.problem.mask.causal, p.problem.mask.window_left, work.request.qo_len, work.request.kv_len);
  Variant::Params params;
  params.set(arguments, p.problem.qo_heads, p.problem.kv_heads, mask);
  Variant variant(params, work.number.get());
  const int column = work.origin + key + static_cast<int>(threadIdx.x) % 4 * 2;
  if (!masked && uniform(divide(group * 64 + 63, p.problem.group_size)) < work.tokens)
    score_rows<false>(p, mask, work, variant, row, column, s);
  else
    score_rows<true>(p, mask, work, variant, row, column, s);
}

// Stores packed row `row`, row h of a thread, by the output transform.
template <class T, int kOutputs>
FI_DEVICE void store_by_variant(const BatchPrefillParams& p, const Variant::Arguments& arguments, const WorkTile& work,
                                int row, const float (&o)[kOutputs], int h, float row_max, float row_sum) {
  const Mask mask =
      Mask::of_range(p.problem.mask.causal, p.problem.mask.window_left, work.request.qo_len, work.request.kv_len);
  Variant::Params params;
  params.set(arguments, p.problem.qo_heads, p.problem.kv_heads, mask);
  Variant variant(params, work.number.get());
  row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
  row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
  Row at = row_of(p, work, row);
  const bool exists = at.i < work.token + work.tokens;
  if (!exists) at = row_of(p, work, 0);  // its results are not stored
  const auto output = variant.end(at, row_max, row_sum, p.problem.out_scale);
  const int64_t token = work.request.qo_begin + at.i;
  const int lane = threadIdx.x % 32;
  if (p.problem.lse && lane % 4 == 0 && exists)
    p.problem.lse[token * p.problem.qo_heads + at.head] = softmax_lse<CudaMath>(row_max, row_sum);
  T* out = static_cast<T*>(p.problem.out) + token * p.problem.out_token + at.head * p.problem.out_head + lane % 4 * 8;
#pragma unroll
  for (int block = 0; block < kOutputs / 4; block += 4) {
    unsigned x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = o + (block + i) * 4 + 2 * h;
      x[i] = pack_pair(output(pair[0]), output(pair[1]), T());
    }
    const uint4 piece = transpose_of_four(x);
    if (exists) store_global(out + block * 8, piece);
  }
}

}  // namespace fi
