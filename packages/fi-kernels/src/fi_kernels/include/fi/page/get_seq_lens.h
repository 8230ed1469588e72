// Parameters of get_seq_lens, and the formula that the CPU and CUDA kernels share.
#pragma once
#include "fi/types.h"

namespace fi {

struct SeqLensParams {
  void* seq_lens;                            // [rows]
  const void *kv_indptr, *kv_last_page_len;  // [rows + 1], [rows]; all three arrays have one integer type
  int64_t rows, page_size;
  int64_t largest, most_full_pages;  // of the integer type; of so many tokens or fewer
};

// Saturates: tables may lie.
template <class I>
FI_HOST_DEVICE void seq_len(const SeqLensParams& p, int64_t row) {
  const I* indptr = static_cast<const I*>(p.kv_indptr);
  const int64_t begin = indptr[row], end = indptr[row + 1], last = static_cast<const I*>(p.kv_last_page_len)[row];
  const uint64_t full = end > begin ? static_cast<uint64_t>(end) - static_cast<uint64_t>(begin) - 1 : 0;
  const int64_t tokens =
      full > static_cast<uint64_t>(p.most_full_pages) ? p.largest : static_cast<int64_t>(full) * p.page_size;
  static_cast<I*>(p.seq_lens)[row] = static_cast<I>(last > p.largest - tokens ? p.largest : tokens + last);
}

}  // namespace fi
