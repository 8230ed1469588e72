// A wgmma tile: 64 x N products of a warpgroup over whole column blocks of swizzled operands, fp32 accumulators in
// registers.
#pragma once
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/cuda/swizzle.cuh"

namespace fi {

// Lane l of warp w holds accumulator d[i] at row wgmma_row(thread) + 8 (i / 2 % 2) and column
// i / 4 * 8 + l % 4 * 2 + i % 2; `thread` counts in the warpgroup.
FI_DEVICE int wgmma_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

// d = a b^T, or d += a b^T: a [64, kColumns] and b [N, kColumns] K-major in shared memory, of which wgmma_operand
// describes the first column block; the others follow a_block and b_block bytes apart. The last block may be partly
// used. Issues one group and does not wait: d must not be touched before wgmma_finish or wgmma_wait.
template <class T, int kColumns, int kCount>
FI_DEVICE void wgmma_shared(float (&d)[kCount], uint64_t a, unsigned a_block, uint64_t b, unsigned b_block,
                            bool accumulate = false) {
  constexpr int kSteps = kColumns * sizeof(T) / 32;
  static_assert(kSteps * 32 == kColumns * sizeof(T), "whole steps");
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < (kSteps + 3) / 4; ++block)
#pragma unroll
    for (int step = 0; step < (kSteps - block * 4 < 4 ? kSteps - block * 4 : 4); ++step)
      wgmma(d, wgmma_further(a, block * a_block + step * 32), wgmma_further(b, block * b_block + step * 32),
            accumulate || block + step > 0, T(), T());
  wgmma_commit();
}

// The same with a in registers, kSteps fragments of 32 bytes of columns; operand b of step s begins s * b_step bytes
// after that of step 0.
template <class T, class TB = T, int kSteps, int kCount>
FI_DEVICE void wgmma_registers(float (&d)[kCount], const unsigned (&a)[kSteps][4], uint64_t b, unsigned b_step,
                               bool accumulate) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma(d, a[step], wgmma_further(b, step * b_step), accumulate || step > 0, T(), TB());
  wgmma_commit();
}

// Waits for all products; d may be read, and shared operands may be overwritten.
template <int kCount>
FI_DEVICE void wgmma_finish(float (&d)[kCount]) {
  wgmma_wait<0>();
  wgmma_keep(d);
}

}  // namespace fi
