// get_batch_indices_positions: the request of each appended row, and the row's position in that request.
#include "fi/page/get_batch_indices_positions.h"

#include "fi/generated/get_batch_indices_positions.h"
#include "fi/host/contents.h"
#include "fi/host/tile.h"

#if !FI_CUDA
#include "fi/cpu/parallel.h"
#include "fi/find_segment.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const BatchPositionsParams& p) {
  cpu::parallel_for(p.rows, 32768, [&](int64_t begin, int64_t end) {
    int32_t b = -1;
    int64_t next = begin;  // first row that needs a new search
    for (int64_t row = begin; row < end; ++row) {
      if (row >= next) {
        b = find_segment(p.append_indptr, p.batch_size, row);
        next = b >= 0 ? p.append_indptr[b + 1] : row < p.append_indptr[0] ? p.append_indptr[0] : end;
      }
      p.batch_indices[row] = b;
      if (b >= 0)
        p.positions[row] = static_cast<int32_t>(p.seq_lens[b] - (p.append_indptr[b + 1] - row));
      else if (p.fill_positions)
        p.positions[row] = 0;
    }
  });
}
#endif

void get_batch_indices_positions(const Kernel& kernel, const GetBatchIndicesPositionsArgs& a) {
  // 1 check
  Dim nnz{"nnz"}, batch{"batch_size"};
  a.seq_lens.is({kI32}).contiguous().shape(batch);
  Dim bounds{"batch_size + 1", batch + 1};
  a.append_indptr.is({kI32}).contiguous().on(a.seq_lens).shape(bounds);
  a.batch_indices.is({kI32}).contiguous().on(a.seq_lens).shape(nnz);
  a.positions.is({kI32}).contiguous().on(a.seq_lens).shape(nnz);
  FI_CHECK(nnz <= 0x7fffffff && batch < 0x7fffffff, ValueError,
           "nnz and batch_size must be below 2^31; got %lld and %lld", static_cast<long long>(nnz),
           static_cast<long long>(batch));
  if (kernel.checks_contents(a.append_indptr.device())) check_offsets(Integers(kernel, a.append_indptr), 0x7fffffff);

  // 2 shape
  BatchPositionsParams p{};
  p.batch_indices = a.batch_indices.data<int32_t>();
  p.positions = a.positions.data<int32_t>();
  p.append_indptr = a.append_indptr.data<int32_t>();
  p.seq_lens = a.seq_lens.data<int32_t>();
  p.rows = nnz;
  p.batch_size = static_cast<int32_t>(batch);
  p.fill_positions = static_cast<int32_t>(a.fill_positions);
  if (p.rows == 0) return;

  // 3 launch
#if FI_CUDA
  launch_threads(kernel, kernel.entries.front(), p.rows, a.seq_lens.device(), p);
#else
  (void)kernel;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::get_batch_indices_positions)
