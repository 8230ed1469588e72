// The work of an expert GEMM: experts that have rows, in passes of at most kTokens rows, in shared memory.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/fused_moe/moe_experts.h"

namespace fi {

struct ExpertPass {
  int row;              // first of the expert's rows
  short expert, count;  // count: rows
};

struct ExpertPasses {
  ExpertPass passes[kMaxExpertPasses];
  int count;

  // By one warp; a barrier of the CTA comes after. Experts without rows have no pass. At most 512 experts.
  template <int kTokens>
  FI_DEVICE void build(const int32_t* offsets, int experts) {
    constexpr int kMost = 16;
    const int lane = threadIdx.x % 32, own = (experts + 31) / 32, first = lane * own;
    int begin[kMost + 1], mine = 0;
#pragma unroll
    for (int i = 0; i <= kMost; ++i) begin[i] = i <= own ? offsets[min(first + i, experts)] : 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (i < own) mine += (begin[i + 1] - begin[i] + kTokens - 1) / kTokens;
    int end = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += x;
    }
    if (lane == 31) count = end;
    int at = end - mine;
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (i < own)
        for (int row = begin[i]; row < begin[i + 1] && at < kMaxExpertPasses; row += kTokens)
          passes[at++] = {row, static_cast<short>(first + i), static_cast<short>(min(kTokens, begin[i + 1] - row))};
  }
};

}  // namespace fi
