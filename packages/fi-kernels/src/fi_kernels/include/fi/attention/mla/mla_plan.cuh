// The planner of batch MLA: one CTA for each kind of q tile writes a schedule.
#pragma once
#include "fi/attention/mla/mla_plan.h"
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// The exclusive prefix sum over the 1024 threads of the CTA.
FI_DEVICE int64_t mla_sum_before(int64_t x, int64_t* warps, int64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan = [&](int64_t y) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t before = __shfl_up_sync(0xffffffffu, y, offset);
      if (lane >= offset) y += before;
    }
    return y;
  };
  const int64_t here = scan(x);
  if (lane == 31) warps[warp] = here;
  __syncthreads();
  if (warp == 0) warps[lane] = scan(warps[lane]);
  __syncthreads();
  total = warps[31];
  return (warp ? warps[warp - 1] : 0) + here - x;
}

// Grid: kMlaSchedules CTAs of 1024 threads. kChunks: with fixed splits.
template <bool kChunks>
FI_DEVICE void mla_plan(const MlaPlanParams& p) {
  constexpr int kThreads = 1024;
  __shared__ int64_t keys[kMlaMaxRanges + 1];
  __shared__ int64_t costs[kThreads];  // of the requests before those of a thread
  __shared__ int64_t warps[32];
  __shared__ int max_splits;
  const int kind = blockIdx.x, tile_rows = p.tile_rows[kind];
  const MlaSchedule schedule = p.view(kind);
  MlaRequest* requests = schedule.requests();
  const int each = (p.batch + kThreads - 1) / kThreads, first = threadIdx.x * each, end = min(first + each, p.batch);
  if (threadIdx.x == 0) max_splits = 1;
  pdl_wait();
  pdl_launch_dependents();
  int64_t cost = 0, total;
#pragma unroll 1
  for (int b = first; b < end; ++b) {
    MlaRequest r = mla_request(p, b, tile_rows);
    r.cost = cost;
    requests[b] = r;
    cost += mla_cost<kChunks>(r, p.chunk_tiles[kind]);
  }
  costs[threadIdx.x] = cost = mla_sum_before(cost, warps, total);
  const MlaRequest one = p.batch ? requests[0] : MlaRequest{};
  bool uniform = true;
#pragma unroll 1
  for (int b = first; b < end; ++b) {
    MlaRequest& r = requests[b];
    r.cost += cost;
    uniform = uniform && r.q_tiles == one.q_tiles && r.item_cost() == one.item_cost();
  }
  uniform = __syncthreads_and(uniform);
  const MlaPartition partition = mla_partition<kChunks>(p, kind, total, one, uniform);
  const int g = threadIdx.x;
  MlaRangeStart start;
  if (g <= p.max_ranges) {
    start = mla_start<kChunks>(p, partition, g, requests, [&](int64_t at) {
      const int from = each * last_not_above((p.batch + each - 1) / each, at, [&](int i) { return costs[i]; });
      return from + last_not_above(min(each, p.batch - from), at, [&](int i) { return requests[from + i].cost; });
    });
    keys[g] = mla_key(start);
  }
  __syncthreads();
  if (g <= p.max_ranges) {
    mla_link_splits(start, p.max_ranges + 1, keys);
    schedule.starts()[g] = start;
    schedule.arrivals()[g] = {};
    if (start.num_splits > 1) atomicMax(&max_splits, start.num_splits);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    schedule.header() = {partition.ranges, partition.cut_tiles, max_splits, mla_header_cost<kChunks>(partition)};
}

}  // namespace fi
