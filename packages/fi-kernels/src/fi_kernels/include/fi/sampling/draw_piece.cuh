// The draw from a row whose pieces are summed, by a whole block: the piece, then the token in it.
#pragma once
#include "fi/sampling/stream.cuh"

namespace fi {
namespace sampling {

template <int kWarps>
struct DrawScratch {
  uint64_t sums[2][kWarps];
  uint64_t rest;
  uint32_t maxima[kWarps];
  int found;
};

// The sum of `own` over the threads before this one, and over all.
template <int kWarps>
FI_DEVICE uint64_t sum_before(uint64_t own, uint64_t (&sums)[kWarps], uint64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t through = warp_scan(own);
  if (lane == 31) sums[warp] = through;
  __syncthreads();
  const uint64_t of_warp = lane < kWarps ? sums[lane] : 0, up_to = warp_scan(of_warp);
  total = __shfl_sync(0xffffffffu, up_to, 31);
  return __shfl_sync(0xffffffffu, up_to - of_warp, warp) + through - own;
}

template <int kWarps>
FI_DEVICE uint32_t largest_key(const PieceSum* pieces, int n, uint32_t (&maxima)[kWarps]) {
  uint32_t top = 0;
#pragma unroll 1
  for (int j = threadIdx.x; j < n; j += kWarps * 32) top = max(top, pieces[j].key);
  top = __reduce_max_sync(0xffffffffu, top);
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = top;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, threadIdx.x % 32 < kWarps ? maxima[threadIdx.x % 32] : 0u);
}

// portion(key) and weigher(key): of a piece with this largest. `first`: no random choice, but the first with weight.
template <int kWarps, class T, class PortionOf, class WeigherOf>
FI_DEVICE void draw_from_pieces(const SampleParams& p, const StreamedRow<T>& row, PieceSum* pieces, int n, int output,
                                bool first, uint64_t random, DrawScratch<kWarps>& shared, PortionOf&& portion,
                                WeigherOf&& weigher) {
  constexpr int kThreads = kWarps * 32, kEach = kPiece / kThreads;
  const int each = (n + kThreads - 1) / kThreads;
  const int from = min(static_cast<int>(threadIdx.x) * each, n), to = min(from + each, n);
  uint64_t own = 0, total;
#pragma unroll 1
  for (int j = from; j < to; ++j) {
    PieceSum& piece = pieces[j];
    piece.sum = piece.key ? portion(piece.key).of(piece.sum) : 0;
    own += piece.sum;
  }
  uint64_t rest = sum_before(own, shared.sums[0], total);
  rest = (first ? 0 : uniform_below(total, random)) - rest;
  if (rest < own) {
    int j = from;
    while (pieces[j].sum <= rest) rest -= pieces[j++].sum;
    shared.found = j, shared.rest = rest;
  }
  __syncthreads();
  const int found = shared.found;
  const uint32_t key = pieces[found].key;
  const Weigher by = weigher(key);
  const Portion part = portion(key);
  const int token = found * kPiece + static_cast<int>(threadIdx.x) * kEach;
  uint64_t weights[kEach];
  own = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) own += weights[k] = by.of(row.at(token + k));
  uint64_t before = sum_before(own, shared.sums[1], total);
  rest = shared.rest;
  if (part.of(before) > rest || part.of(before + own) <= rest) return;
  int k = 0;
#pragma unroll
  for (; k < kEach - 1; ++k) {
    before += weights[k];
    if (part.of(before) > rest) break;
  }
  put_token(p, output, token + k, true);
}

}  // namespace sampling
}  // namespace fi
