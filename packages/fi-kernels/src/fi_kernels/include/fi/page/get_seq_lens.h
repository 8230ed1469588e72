// Parameters of get_seq_lens, and the formula that the CPU and CUDA kernels share.
#pragma once
#include "fi/types.h"

namespace fi {

struct SeqLensParams {
  void* seq_lens;                            // [rows]
  const void *kv_indptr, *kv_last_page_len;  // [rows + 1], [rows]; all three arrays have one integer type
  int64_t rows, page_size;
};

template <class I>
FI_HOST_DEVICE void seq_len(const SeqLensParams& p, int64_t row) {
  const I* indptr = static_cast<const I*>(p.kv_indptr);
  const I full = indptr[row + 1] - indptr[row] - 1;
  static_cast<I*>(p.seq_lens)[row] =
      (full > 0 ? full : 0) * static_cast<I>(p.page_size) + static_cast<const I*>(p.kv_last_page_len)[row];
}

}  // namespace fi
