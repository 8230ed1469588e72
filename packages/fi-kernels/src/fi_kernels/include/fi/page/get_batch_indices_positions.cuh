// One thread per row finds the row's request by binary search, so padding rows need no second kernel.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/find_segment.h"
#include "fi/page/get_batch_indices_positions.h"

namespace fi {

FI_DEVICE void batch_indices_positions(const BatchPositionsParams& p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  pdl_wait();
  pdl_launch_dependents();
  if (row >= p.rows) return;
  const int32_t b = find_segment(p.append_indptr, p.batch_size, row);
  p.batch_indices[row] = b;
  if (b >= 0)
    p.positions[row] = p.seq_lens[b] - (p.append_indptr[b + 1] - static_cast<int32_t>(row));
  else if (p.fill_positions)
    p.positions[row] = 0;
}

}  // namespace fi
