// The planner of batch prefill: one CTA chooses the height of q tiles, sorts the q tiles of all requests by their KV
// tiles with a counting sort, longest first, and chooses num_splits for the last work tiles.
#pragma once
#include "fi/attention/prefill/prefill_plan.h"
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

struct PrefillPlanner {
  static constexpr int kLevels = 1024, kNear = 512;
  struct Shared {
    int32_t place[kLevels];
    PrefillRequest requests[kNear];  // loaded once: table reads dominate the plan
    unsigned long long work[2];
    int32_t q_tiles[2], longest[2], total;
  };

  const PrefillPlanParams& p;
  Shared& shared;

  // The order of tiles of about equal work varies: no result depends on the CTA that runs a tile.
  FI_DEVICE void run() const {
    const int threads = blockDim.x;
    for (int i = threadIdx.x; i < kLevels; i += threads) shared.place[i] = 0;
    if (threadIdx.x < 2) shared.work[threadIdx.x] = 0, shared.q_tiles[threadIdx.x] = shared.longest[threadIdx.x] = 0;
    pdl_wait();
    for (int b = threadIdx.x; b < p.batch; b += threads) {
      const PrefillRequest r = p.request(b);
      p.schedule.requests[b] = r;
      if (b < kNear) shared.requests[b] = r;
    }
    if (p.max_partials > 0)
      for (int i = threadIdx.x; i < PrefillSchedule::kCounters; i += threads) p.schedule.counters[i] = 0;
    __syncthreads();
    measure(0, p.tile_tokens);
    __syncthreads();
    PrefillTileStats tiles = measured(0);
    int tokens = p.tile_tokens;
    // With many waves of tiles, the height matters only to the last wave.
    if (p.short_tile_tokens > 0 && static_cast<int64_t>(tiles.num_tiles) * p.kv_heads <= 4 * p.num_ctas) {
      measure(1, p.short_tile_tokens);
      __syncthreads();
      const PrefillTileStats low = measured(1);
      if (low.num_tiles <= p.max_tiles &&
          prefers_short(tiles, low, p.kv_heads, p.num_ctas, p.max_partials, best_cost)) {
        tiles = low;
        tokens = p.short_tile_tokens;
      }
    }
    int shift = 0;
    while ((tiles.longest >> shift) >= kLevels) ++shift;
    each_tile(tokens, [&](int, int, int work) { atomicAdd(&shared.place[kLevels - 1 - (work >> shift)], 1); });
    __syncthreads();
    if (threadIdx.x < 32) sum();
    __syncthreads();
    each_tile(tokens, [&](int b, int t, int work) {
      const int at = atomicAdd(&shared.place[kLevels - 1 - (work >> shift)], 1);
      if (at < p.max_tiles) p.schedule.tiles[at] = {b, t};
    });
    __syncthreads();
    if (threadIdx.x < 32) write_header(tiles, tokens);
  }

 private:
  FI_DEVICE PrefillRequest request(int b) const { return b < kNear ? shared.requests[b] : p.schedule.requests[b]; }

  // Calls take(request, tile, work) for every tile.
  template <class Take>
  FI_DEVICE void each_tile(int tokens, Take take) const {
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (int b = threadIdx.x / 32; b < p.batch; b += warps) {
      const PrefillRequest r = request(b);
      for (int t = lane; t < PrefillPlanParams::tiles(r, tokens); t += 32) take(b, t, p.kv_tiles(r, t, tokens));
    }
  }

  FI_DEVICE void measure(int which, int tokens) const {
    long long work = 0;
    int q_tiles = 0, longest = 0;
    each_tile(tokens, [&](int, int, int more) {
      work += more;
      ++q_tiles;
      longest = max(longest, more);
    });
    if (q_tiles > 0) {
      atomicAdd(&shared.work[which], static_cast<unsigned long long>(work));
      atomicAdd(&shared.q_tiles[which], q_tiles);
      atomicMax(&shared.longest[which], longest);
    }
  }
  FI_DEVICE PrefillTileStats measured(int which) const {
    return {static_cast<int64_t>(shared.work[which]), shared.q_tiles[which], shared.longest[which]};
  }

  // Replaces counts by their exclusive prefix sums.
  FI_DEVICE void sum() const {
    const int lane = threadIdx.x;
    int before = 0;
    for (int i = lane; i < kLevels; i += 32) {
      const int count = shared.place[i];
      int sum = count;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
      }
      shared.place[i] = before + sum - count;
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) shared.total = before;
  }

  // The least cost of a split: each lane tries one num_splits.
  FI_DEVICE static unsigned best_cost(const PrefillSplit& split) {
    return __reduce_min_sync(0xffffffffu, split.cost(threadIdx.x % 32 + 1));
  }

  // By one warp.
  FI_DEVICE void write_header(const PrefillTileStats& tiles, int tokens) const {
    const int q_tiles = min(shared.total, p.max_tiles), work_tiles = q_tiles * p.kv_heads;
    PrefillSplit split = PrefillSplit::of(tiles, p.kv_heads, p.num_ctas, p.max_partials);
    if (split.first < work_tiles) {
      const PrefillWorkTile entry = p.schedule.tiles[split.first / p.kv_heads];
      split.kv_tiles = p.kv_tiles(request(entry.request), entry.q_tile, tokens);
    }
    const int num_splits = PrefillSplit::num_splits(best_cost(split));
    if (threadIdx.x == 0)
      *p.schedule.header = {q_tiles,
                            0,
                            0,
                            tokens,
                            num_splits > 1 ? split.first : work_tiles,
                            num_splits,
                            (split.kv_tiles + num_splits - 1) / num_splits,
                            0};
  }
};

FI_DEVICE void prefill_plan(const PrefillPlanParams& p) {
  __shared__ PrefillPlanner::Shared shared;
  PrefillPlanner{p, shared}.run();
}

}  // namespace fi
