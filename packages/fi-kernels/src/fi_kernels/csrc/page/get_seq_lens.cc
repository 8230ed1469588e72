// get_seq_lens: tokens of each request from its pages.
#include "fi/page/get_seq_lens.h"

#include "fi/host/op.h"

namespace fi {
namespace {

void lengths(const Kernel& kernel, Tensor seq_lens, Tensor kv_indptr, Tensor kv_last_page_len, int64_t page_size) {
  // 1 check
  Dim batch{"batch_size"};
  kv_last_page_len.is({kI32, kI64}).contiguous().shape(batch);
  Dim bounds{"batch_size + 1", batch + 1};
  kv_indptr.like(kv_last_page_len).contiguous().shape(bounds);
  seq_lens.like(kv_last_page_len).contiguous().shape(batch);
  FI_CHECK(page_size > 0, ValueError, "page_size must be > 0; got %lld", static_cast<long long>(page_size));

  // 2 shape
  SeqLensParams p{};
  p.seq_lens = seq_lens.data();
  p.kv_indptr = kv_indptr.data();
  p.kv_last_page_len = kv_last_page_len.data();
  p.rows = batch;
  p.page_size = page_size;
  if (p.rows == 0) return;

  // 3 launch
#if FI_CUDA
  const Entry& entry = kernel.entries[seq_lens.dtype() == kI64];  // config: none, one entry an integer type
  Launch config{(p.rows + entry.threads - 1) / entry.threads};
  config.pdl = kernel.pdl(-1);
  kernel.launch(entry, config, seq_lens.device(), p);
#else
  (void)kernel;
  const auto run = seq_lens.dtype() == kI64 ? seq_len<int64_t> : seq_len<int32_t>;
  for (int64_t row = 0; row < p.rows; ++row) run(p, row);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::lengths, "seq_lens", "kv_indptr", "kv_last_page_len", "page_size")
