// Where the attention kernels find the tokens of a request: page(j) times a page's stride plus slot(j) times a token's.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/divisor.h"

namespace fi {

// Where keys lie that follow each other: token j in slot j of the only page.
struct OnePage {
  static constexpr int64_t k_page = 0, v_page = 0;
  FI_DEVICE int64_t page(int) const { return 0; }
  FI_DEVICE int slot(int j) const { return j; }
};

// Token j of a request lies in slot j % size of page ids[j / size].
struct PagedTokens {
  const int32_t* ids;
  Divisor size;
  int64_t k_page, v_page;
  FI_DEVICE int64_t page(int j) const { return ids[divide(j, size)]; }
  FI_DEVICE int slot(int j) const { return j - static_cast<int>(divide(j, size) * size.value); }
};

// The walk of a block, in shared memory: one thread takes the steps, which saves the others thirty registers.
struct BlockWalk {
  DecodeWalk walk;
  DecodeSegment segment;
  bool more;

  FI_DEVICE void begin(const BatchDecodeParams& params) {
    walk.begin(params.view(), blockIdx.x, params.problem.mask.qo_len, params.problem.mask.window_left);
  }
  // By all threads of the block, the first of which has called begin. A barrier.
  FI_DEVICE bool next() {
    __syncthreads();
    if (threadIdx.x == 0) more = walk.next(segment);
    __syncthreads();
    return more;
  }
};

// The same where the keys may also be ragged: without ids, one page.
struct TokensOfEither : PagedTokens {
  FI_DEVICE int64_t page(int j) const { return ids ? PagedTokens::page(j) : 0; }
  FI_DEVICE int slot(int j) const { return ids ? PagedTokens::slot(j) : j; }
};

}  // namespace fi
