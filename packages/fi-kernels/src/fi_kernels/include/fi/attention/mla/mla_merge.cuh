// Merges the partials of items whose KV was split: the second kernel of batch MLA.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/cuda/convert.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/cuda/reduce.cuh"

namespace fi {

// The boundaries that follow the leader of a split item, in order, by all threads; returns their number.
FI_DEVICE int find_split_items(const MlaSchedule& schedule, int ranges, int* items, int* count) {
  __shared__ unsigned votes[(kMlaMaxRanges + 1) / 32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll 2
  for (int word = threadIdx.x / 32; word * 32 < ranges; word += warps) {
    const int g = word * 32 + lane;
    bool leads = false;
    if (g > 0 && g < ranges) {
      const MlaRangeStart* start = schedule.starts() + g;
      leads = start->num_splits > 1 && start->leader == g - 1;
    }
    const unsigned vote = __ballot_sync(0xffffffffu, leads);
    if (lane == 0) votes[word] = vote;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int found = 0;
    for (int word = 0; word * 32 < ranges; ++word) {
      const unsigned vote = votes[word];
      if (vote >> lane & 1) items[found + __popc(vote & ((1u << lane) - 1))] = word * 32 + lane;
      found += __popc(vote);
    }
    if (lane == 0) *count = found;
  }
  __syncthreads();
  return *count;
}

// One row of a split item.
struct MlaMergeRow {
  const BatchMlaParams& params;
  MlaRangeStart start;
  MlaRequest request;
  int row, packed;

  FI_DEVICE MlaMergeRow(const BatchMlaParams& p, int boundary, int r) : params(p), row(r) {
    start = p.view().starts()[boundary];
    request = p.view().requests()[start.request];
    packed = start.q_tile * p.tile_rows + r;
  }
  FI_DEVICE bool exists() const { return packed < request.qo_len * static_cast<int>(params.heads.value); }
  FI_DEVICE float2 state(int split) const {
    return __ldcg(reinterpret_cast<const float2*>(params.partial_states(mla_partial(start.leader, split))) + row);
  }
  FI_DEVICE float4 values(int split, int column) const {
    const float* part =
        params.partial_output(mla_partial(start.leader, split)) + static_cast<int64_t>(row) * kMlaLatent;
    return __ldcg(reinterpret_cast<const float4*>(part + column));
  }
  FI_DEVICE static void add(float4& sum, float weight, float4 x) {
    sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
  }
  // Writes four columns; those from column 0 on also the LSE.
  template <class T>
  FI_DEVICE void write(int column, float4 sum, float row_max, float row_sum) const {
    const auto at = params.row(packed);
    const float factor = params.finish<CudaMath>(at.head, row_max, row_sum);
    const int64_t token = request.qo_begin + at.token;
    T* out = static_cast<T*>(params.out) + token * params.out_token + at.head * params.out_head + column;
    store_global(out, make_uint2(pack_pair(sum.x * factor, sum.y * factor, T()),
                                 pack_pair(sum.z * factor, sum.w * factor, T())));
    if (params.lse && column == 0)
      params.lse[token * params.heads.value + at.head] = softmax_lse<CudaMath>(row_max, row_sum) * params.lse_factor;
  }
};

// Few splits: a warp merges a row, with the loads of four splits on their way.
constexpr int kMlaFewSplits = 8;
template <class T>
FI_DEVICE void merge_by_warps(const BatchMlaParams& params, const int* items, int count) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  const int tasks = count * params.tile_rows;
  for (int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; task < tasks; task += warps) {
    const MlaMergeRow row(params, items[task / params.tile_rows], task % params.tile_rows);
    if (!row.exists()) continue;
    const int n = row.start.num_splits;
    const float2 state = lane < n ? row.state(lane) : make_float2(kMinusInf, 0.f);
    const float top = warp_max(state.x), weight = softmax_exp2<CudaMath>(state.x, softmax_reference(top));
    const float row_sum = warp_sum(weight * state.y);
    float4 sums[4] = {};
#pragma unroll 1
    for (int first = 0; first < n; first += 4) {
      float4 values[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) values[i][k] = row.values(min(first + i, n - 1), k * 128 + lane * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = __shfl_sync(0xffffffffu, weight, first + i);  // 0 beyond the last split
#pragma unroll
        for (int k = 0; k < 4; ++k) MlaMergeRow::add(sums[k], factor, values[i][k]);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) row.write<T>(k * 128 + lane * 4, sums[k], top, row_sum);
  }
}

// Any grid of 128 threads. Sums are in a fixed order.
template <class T>
FI_DEVICE void batch_mla_merge(const BatchMlaParams& params) {
  constexpr int kThreads = 128, kGroups = 4, kColumns = 128;
  __shared__ int items[kMlaMaxRanges];
  __shared__ float weights[kMlaMaxRanges + 1];
  __shared__ float4 sums[kGroups][32];
  __shared__ float warp_values[8];
  __shared__ int count;
  const MlaSchedule schedule = params.view();
  const int thread = threadIdx.x, lane = thread % 32, group = thread / 32;
  pdl_wait();
  const MlaHeader header = schedule.header();
  pdl_launch_dependents();
  if (header.max_splits <= 1) return;
  const int found = find_split_items(schedule, header.ranges, items, &count);
  if (header.max_splits <= kMlaFewSplits) return merge_by_warps<T>(params, items, found);
  // Many splits: a task is 128 columns of a row, 32 lanes of four columns by four groups of splits.
  const int tasks = found * params.tile_rows * (kMlaLatent / kColumns);
  for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int column = task % 4 * kColumns + lane * 4;
    const MlaMergeRow row(params, items[task / 4 / params.tile_rows], task / 4 % params.tile_rows);
    if (!row.exists()) continue;
    const int n = row.start.num_splits;
    float top = kMinusInf;
    for (int i = thread; i < n; i += kThreads) top = fmaxf(top, row.state(i).x);
    top = warp_max(top);
    if (lane == 0) warp_values[group] = top;
    __syncthreads();
    top = fmaxf(fmaxf(warp_values[0], warp_values[1]), fmaxf(warp_values[2], warp_values[3]));
    float row_sum = 0.f;
    for (int i = thread; i < n; i += kThreads) {
      const float2 state = row.state(i);
      weights[i] = softmax_exp2<CudaMath>(state.x, softmax_reference(top));
      row_sum += weights[i] * state.y;
    }
    row_sum = warp_sum(row_sum);
    if (lane == 0) warp_values[4 + group] = row_sum;
    __syncthreads();
    row_sum = (warp_values[4] + warp_values[5]) + (warp_values[6] + warp_values[7]);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int i = group; i < n; i += kGroups) MlaMergeRow::add(sum, weights[i], row.values(i, column));
    sums[group][lane] = sum;
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int i = 1; i < kGroups; ++i) MlaMergeRow::add(sum, 1.f, sums[i][lane]);
      row.write<T>(column, sum, top, row_sum);
    }
    __syncthreads();
  }
}

}  // namespace fi
