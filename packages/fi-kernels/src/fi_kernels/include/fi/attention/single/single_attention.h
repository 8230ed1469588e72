// Parameters of single-request attention, shared by launcher, device code and CPU code.
#pragma once
#include "fi/attention/problem.h"

namespace fi {

// With num_splits > 1 the keys of every row are split. The workspace holds, per split and row (i, head), the
// unnormalised output [head_dim_vo] and the state row_max, row_sum: [num_splits, qo_len * qo_heads, head_dim_vo + 2].
struct SingleAttentionParams {
  AttentionProblem problem;
  float* workspace;
  int32_t num_splits;

  FI_HOST_DEVICE float* partial(int32_t split, Row row) const {
    const int64_t rows = static_cast<int64_t>(problem.mask.qo_len) * problem.qo_heads;
    const int64_t index = static_cast<int64_t>(row.i) * problem.qo_heads + row.head;
    return workspace + (split * rows + index) * (problem.head_dim_vo + 2);
  }
};

// The keys of a split of [begin, end); the last splits may be empty.
struct KeyRange {
  int32_t begin, end;
};
FI_HOST_DEVICE KeyRange split_keys(KeyRange all, int32_t split, int32_t num_splits) {
  const int32_t length = (all.end - all.begin + num_splits - 1) / num_splits;
  const int64_t begin = all.begin + static_cast<int64_t>(split) * length;
  if (begin >= all.end) return {all.end, all.end};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(begin + length < all.end ? begin + length : all.end)};
}

}  // namespace fi
