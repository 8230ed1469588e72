// sample on sm_90 for rows without filters, with a k of few or with a large share, in blocks that hold nothing.
#pragma once
#include "fi/sampling/stream_few.cuh"
#include "fi/sampling/stream_row.cuh"
#include "fi/sampling/team_sm90.cuh"

namespace fi {

// One cluster a row, but for rows that are not streamed.
template <class T, int kThreads>
FI_DEVICE void sample_stream(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  __shared__ FewScratch<kWarps> shared;
  if (threadIdx.x == 0) shared.count = shared.quarter_count = 0;
  pdl_wait();
  pdl_launch_dependents();  // the kernel for the other rows, which waits for nothing but the end of this one
  const int output = blockIdx.x / cluster_size();
  const int64_t row = source_row(p, output);
  if (missing(p, output, row) || !is_streamed(p, row)) return;
  extern __shared__ uint4 dynamic[];
  stream_row<T, Cluster, kWarps>(
      p, reinterpret_cast<PieceSum*>(dynamic), output, row,
      [&](const StreamedRow<T>& streamed, PieceSum* pieces, int n, uint64_t random, uint32_t& lowest) {
        FewOfRow<T, kWarps> few{p, streamed, pieces, n, {}, shared};
        if (!is_share(p, row) && few.draw(output, row, random)) return false;
        lowest = few.find(row);
        return true;
      });
}

}  // namespace fi
