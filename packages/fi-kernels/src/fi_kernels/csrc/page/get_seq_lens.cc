// get_seq_lens: the number of tokens of each request, from its page table.
#include "fi/page/get_seq_lens.h"

#include "fi/generated/get_seq_lens.h"
#include "fi/host/tile.h"

namespace fi {
namespace {

void get_seq_lens(const Kernel& kernel, const GetSeqLensArgs& a) {
  // 1 check
  Dim batch{"batch_size"};
  a.kv_last_page_len.is({kI32, kI64}).contiguous().shape(batch);
  Dim bounds{"batch_size + 1", batch + 1};
  a.kv_indptr.like(a.kv_last_page_len).contiguous().shape(bounds);
  a.seq_lens.like(a.kv_last_page_len).contiguous().shape(batch);
  FI_CHECK(a.page_size > 0 && a.page_size <= 0x7fffffff, ValueError, "page_size must be in 1..2^31 - 1; got %lld",
           static_cast<long long>(a.page_size));

  // 2 shape
  SeqLensParams p{};
  p.seq_lens = a.seq_lens.data();
  p.kv_indptr = a.kv_indptr.data();
  p.kv_last_page_len = a.kv_last_page_len.data();
  p.rows = batch;
  p.page_size = a.page_size;
  p.largest = a.seq_lens.dtype() == kI64 ? INT64_MAX : INT32_MAX;
  p.most_full_pages = p.largest / a.page_size;
  if (p.rows == 0) return;

  // 3 launch
#if FI_CUDA
  const Entry& entry = kernel.entries[a.seq_lens.dtype() == kI64];  // one entry per integer type; no config
  launch_threads(kernel, entry, p.rows, a.seq_lens.device(), p);
#else
  (void)kernel;
  const auto run = a.seq_lens.dtype() == kI64 ? seq_len<int64_t> : seq_len<int32_t>;
  for (int64_t row = 0; row < p.rows; ++row) run(p, row);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::get_seq_lens)
