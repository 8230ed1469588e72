// The draw from a row whose pieces are summed, by a whole block: the piece, then the token in it.
#pragma once
#include "fi/sampling/stream.cuh"

namespace fi {
namespace sampling {

// Of so many draws at once, each by a group of warps.
template <int kWarps, int kGroups>
struct DrawScratch {
  uint64_t sums[2][kWarps];
  uint64_t rest[kGroups];
  uint32_t maxima[kWarps];
  int found[kGroups];
};

// The sum of `own` over the threads of the group before this one, and over the block.
template <int kGroups, int kWarps>
FI_DEVICE uint64_t sum_before(uint64_t own, uint64_t (&sums)[kWarps], uint64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t through = warp_scan(own);
  if (lane == 31) sums[warp] = through;
  __syncthreads();
  const uint64_t of_warp = lane < kWarps ? sums[lane] : 0, up_to = warp_scan(of_warp);
  total = __shfl_sync(0xffffffffu, up_to, 31);
  uint64_t before = __shfl_sync(0xffffffffu, up_to - of_warp, warp) + through - own;
  if (kGroups > 1) before -= __shfl_sync(0xffffffffu, up_to - of_warp, warp - warp % (kWarps / kGroups));
  return before;
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

// The pieces that a thread adds up.
template <int kThreads>
FI_DEVICE int own_pieces(int n, int& to) {
  const int each = (n + kThreads - 1) / kThreads, from = min(static_cast<int>(threadIdx.x) * each, n);
  to = min(from + each, n);
  return from;
}
// What pieces count in their row. portion(key): of a piece with this largest.
template <int kWarps, class PortionOf>
FI_DEVICE void scale_pieces(PieceSum* pieces, int n, PortionOf&& portion) {
  int to;
#pragma unroll 1
  for (int j = own_pieces<kWarps * 32>(n, to); j < to; ++j)
    pieces[j].sum = pieces[j].key ? portion(pieces[j].key).of(pieces[j].sum) : 0;
}
// Draw g has the token where sums pass target(total, g), and put(g, token) is called for it once. weigher(key): of the
// elements of a piece with this largest.
template <int kGroups, class T, int kWarps, class Target, class PortionOf, class WeigherOf, class Put>
FI_DEVICE void draw_from_pieces(const StreamedRow<T>& row, const PieceSum* pieces, int n,
                                DrawScratch<kWarps, kGroups>& shared, Target&& target, PortionOf&& portion,
                                WeigherOf&& weigher, Put&& put) {
  constexpr int kThreads = kWarps * 32, kMembers = kThreads / kGroups, kEach = kPiece / kMembers;
  int to;
  const int from = own_pieces<kThreads>(n, to);
  uint64_t own = 0, total;
#pragma unroll 1
  for (int j = from; j < to; ++j) own += pieces[j].sum;
  const uint64_t sums_before = sum_before<1>(own, shared.sums[0], total);
#pragma unroll 1
  for (int g = 0; g < kGroups; ++g) {
    uint64_t rest = target(total, g) - sums_before;
    if (rest >= own) continue;
    int j = from;
    while (pieces[j].sum <= rest) rest -= pieces[j++].sum;
    shared.found[g] = j, shared.rest[g] = rest;
  }
  __syncthreads();
  const int group = threadIdx.x / kMembers, found = shared.found[group];
  const uint32_t key = pieces[found].key;
  const Weigher by = weigher(key);
  const Portion part = portion(key);
  const int token = found * kPiece + static_cast<int>(threadIdx.x) % kMembers * kEach;
  uint64_t weights[kEach];
  own = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) own += weights[k] = by.of(row.at(token + k));
  uint64_t before = sum_before<kGroups>(own, shared.sums[1], total);
  const uint64_t rest = shared.rest[group];
  if (part.of(before) > rest || part.of(before + own) <= rest) return;
  int k = 0;
#pragma unroll
  for (; k < kEach - 1; ++k) {
    before += weights[k];
    if (part.of(before) > rest) break;
  }
  put(group, token + k);
}

}  // namespace sampling
}  // namespace fi
