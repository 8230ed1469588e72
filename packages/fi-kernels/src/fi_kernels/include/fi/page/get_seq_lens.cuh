// Computes the length of each paged request, one thread per request.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/page/get_seq_lens.h"

namespace fi {

template <class I>
FI_DEVICE void seq_lens(const SeqLensParams& p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  pdl_wait();
  pdl_launch_dependents();
  if (row < p.rows) seq_len<I>(p, row);
}

}  // namespace fi
