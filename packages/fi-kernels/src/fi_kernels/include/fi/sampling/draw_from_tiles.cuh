// Draws tokens from a row whose tile weights are known: one CTA finds the tile, then the token in the tile.
#pragma once
#include "fi/sampling/global_row.cuh"

namespace fi {
namespace sampling {

// Shared memory of `kDrawCount` simultaneous draws; each draw is finished by kWarps / kDrawCount warps.
template <int kWarps, int kDrawCount>
struct DrawShared {
  uint64_t sums[2][kWarps];
  uint64_t remaining[kDrawCount];
  uint32_t maxima[kWarps];
  int found[kDrawCount];
};

// Returns the exclusive prefix sum of `own` over the threads that share a draw; `total` becomes the sum over the CTA.
template <int kDrawCount, int kWarps>
FI_DEVICE uint64_t exclusive_sum(uint64_t own, uint64_t (&sums)[kWarps], uint64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t inclusive = warp_scan(own);
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  const uint64_t of_warp = lane < kWarps ? sums[lane] : 0, up_to = warp_scan(of_warp);
  total = __shfl_sync(0xffffffffu, up_to, 31);
  uint64_t before = __shfl_sync(0xffffffffu, up_to - of_warp, warp) + inclusive - own;
  if (kDrawCount > 1) before -= __shfl_sync(0xffffffffu, up_to - of_warp, warp - warp % (kWarps / kDrawCount));
  return before;
}

template <int kWarps>
FI_DEVICE uint32_t max_tile_key(const TileSum* tiles, int n, uint32_t (&maxima)[kWarps]) {
  uint32_t max_key = 0;
#pragma unroll 1
  for (int j = threadIdx.x; j < n; j += kWarps * 32) max_key = max(max_key, tiles[j].max_key);
  max_key = __reduce_max_sync(0xffffffffu, max_key);
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = max_key;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, threadIdx.x % 32 < kWarps ? maxima[threadIdx.x % 32] : 0u);
}

// Returns the first of the consecutive tiles that this thread sums; `to` is one past the last.
template <int kThreads>
FI_DEVICE int own_tiles(int n, int& to) {
  const int each = (n + kThreads - 1) / kThreads, from = min(static_cast<int>(threadIdx.x) * each, n);
  to = min(from + each, n);
  return from;
}
// Rescales the tile sums to the row's scale. `rescale_of(max_key)` returns the factor of a tile.
template <int kWarps, class RescaleOf>
FI_DEVICE void rescale_tiles(TileSum* tiles, int n, RescaleOf&& rescale_of) {
  int to;
#pragma unroll 1
  for (int j = own_tiles<kWarps * 32>(n, to); j < to; ++j)
    tiles[j].sum = tiles[j].max_key ? rescale_of(tiles[j].max_key).apply(tiles[j].sum) : 0;
}
// Inverts the CDF of the row for each draw g: finds the token at which the running weight exceeds `target(total, g)`,
// and calls `put(g, token)` once, in one thread. `weight_of(max_key)` returns the weight function of a tile's elements.
template <int kDrawCount, class T, int kWarps, class Target, class RescaleOf, class WeightOf, class Put>
FI_DEVICE void draw_from_tiles(const GlobalRow<T>& row, const TileSum* tiles, int n,
                               DrawShared<kWarps, kDrawCount>& shared, Target&& target, RescaleOf&& rescale_of,
                               WeightOf&& weight_of, Put&& put) {
  constexpr int kThreads = kWarps * 32, kThreadsPerDraw = kThreads / kDrawCount,
                kPerThread = kTileSize / kThreadsPerDraw;
  int to;
  const int from = own_tiles<kThreads>(n, to);
  uint64_t own = 0, total;
#pragma unroll 1
  for (int j = from; j < to; ++j) own += tiles[j].sum;
  const uint64_t sums_before = exclusive_sum<1>(own, shared.sums[0], total);
#pragma unroll 1
  for (int g = 0; g < kDrawCount; ++g) {
    uint64_t remaining = target(total, g) - sums_before;
    if (remaining >= own) continue;
    int j = from;
    while (tiles[j].sum <= remaining) remaining -= tiles[j++].sum;
    shared.found[g] = j, shared.remaining[g] = remaining;
  }
  __syncthreads();
  const int draw = threadIdx.x / kThreadsPerDraw, found = shared.found[draw];
  const uint32_t key = tiles[found].max_key;
  const WeightFunction weight = weight_of(key);
  const Rescale rescale = rescale_of(key);
  const int token = found * kTileSize + static_cast<int>(threadIdx.x) % kThreadsPerDraw * kPerThread;
  uint64_t weights[kPerThread];
  own = 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) own += weights[k] = weight(row.at(token + k));
  uint64_t before = exclusive_sum<kDrawCount>(own, shared.sums[1], total);
  const uint64_t remaining = shared.remaining[draw];
  if (rescale.apply(before) > remaining || rescale.apply(before + own) <= remaining) return;
  int k = 0;
#pragma unroll
  for (; k < kPerThread - 1; ++k) {
    before += weights[k];
    if (rescale.apply(before) > remaining) break;
  }
  put(draw, token + k);
}

}  // namespace sampling
}  // namespace fi
