// Parameters of single-request attention, shared by launcher, device code and CPU code.
#pragma once
#include "fi/attention/problem.h"

namespace fi {

// With chunks > 1 the keys of every row are split, and each part leaves in the workspace, per row (i, head), its
// unnormalised output [dim_vo] and its softmax state m, d: [chunks, qo_len * qo_heads, dim_vo + 2].
struct SingleAttentionParams {
  AttentionProblem problem;
  float* workspace;
  int32_t chunks;

  FI_HOST_DEVICE float* partial(int32_t chunk, Row row) const {
    const int64_t rows = static_cast<int64_t>(problem.mask.qo_len) * problem.qo_heads;
    const int64_t index = static_cast<int64_t>(row.i) * problem.qo_heads + row.head;
    return workspace + (chunk * rows + index) * (problem.dim_vo + 2);
  }
};

// The part of keys [begin, end) that a chunk takes; the last parts may be empty.
struct KeyRange {
  int32_t begin, end;
};
FI_HOST_DEVICE KeyRange chunk_of(KeyRange all, int32_t chunk, int32_t chunks) {
  const int32_t share = (all.end - all.begin + chunks - 1) / chunks;
  const int64_t begin = all.begin + static_cast<int64_t>(chunk) * share;
  if (begin >= all.end) return {all.end, all.end};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(begin + share < all.end ? begin + share : all.end)};
}

}  // namespace fi
