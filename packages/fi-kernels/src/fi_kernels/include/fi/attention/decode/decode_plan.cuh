// The planner of batch decode: one CTA writes the schedule.
#pragma once
#include "fi/attention/decode/decode_plan.h"
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// The exclusive prefix sums over the 1024 threads of the CTA.
FI_DEVICE DecodeCost sum_before(DecodeCost x, DecodeCost* warps, DecodeCost& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan = [&](DecodeCost y) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int tiles = __shfl_up_sync(0xffffffffu, y.tiles, offset);
      const int chunks = __shfl_up_sync(0xffffffffu, y.chunks, offset);
      if (lane >= offset) y.tiles += tiles, y.chunks += chunks;
    }
    return y;
  };
  const DecodeCost here = scan(x);
  if (lane == 31) warps[warp] = here;
  __syncthreads();
  if (warp == 0) warps[lane] = scan(warps[lane]);
  __syncthreads();
  total = warps[31];
  const DecodeCost before = warp ? warps[warp - 1] : DecodeCost{0, 0};
  return {before.tiles + here.tiles - x.tiles, before.chunks + here.chunks - x.chunks};
}

// Grid: one CTA of 1024 threads.
FI_DEVICE void decode_plan(const DecodePlanParams& p) {
  constexpr int kThreads = 1024, kNear = 2048;
  __shared__ int64_t keys[kDecodeMaxRanges + 1];
  __shared__ DecodeRequest near[kNear];  // a copy of the requests of smaller batches, for the searches
  __shared__ DecodeCost warps[32];
  const DecodeSchedule schedule = p.view();
  DecodeRequest* requests = schedule.requests();
  const int each = (p.batch + kThreads - 1) / kThreads, first = threadIdx.x * each, end = min(first + each, p.batch);
  pdl_wait();
  pdl_launch_dependents();
  DecodeCost cost{0, 0}, total;
  const int32_t tiles = p.batch ? decode_cost(p, decode_request(p, 0).kv_len).tiles : 0;
  bool uniform = true;
#pragma unroll 1
  for (int b = first; b < end; ++b) {
    const DecodeCost one = decode_cost(p, decode_request(p, b).kv_len);
    cost.tiles += one.tiles, cost.chunks += one.chunks;
    uniform = uniform && one.tiles == tiles;
  }
  cost = sum_before(cost, warps, total);
#pragma unroll 1
  for (int b = first; b < end; ++b) {
    DecodeRequest r = decode_request(p, b);
    r.cost = cost.tiles, r.chunks = cost.chunks;
    requests[b] = r;
    if (p.batch <= kNear) near[b] = r;
    const DecodeCost one = decode_cost(p, r.kv_len);
    cost.tiles += one.tiles, cost.chunks += one.chunks;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.counters; i += kThreads) schedule.counters()[i] = 0;
  uniform = __syncthreads_and(uniform);
  const DecodePartition partition = decode_partition(p, total.tiles, uniform);
  if (threadIdx.x == 0) schedule.header() = decode_header(p, partition, total.chunks);
  const int g = threadIdx.x;
  DecodeRangeStart start;
  if (g <= p.num_ranges) {
    const DecodeRequest* table = requests;
    if (p.batch <= kNear) table = near;
    start = decode_start(p, partition, g, table);
    keys[g] = decode_key(p, start);
  }
  __syncthreads();
  if (g > p.num_ranges) return;
  decode_link_splits(p, start, keys);
  schedule.starts()[g] = start;
}

}  // namespace fi
