// moe_sort on sm_80 and later: one launch of one CTA, or of a cluster of CTAs on sm_90. Each warp counts the slots of
// each expert in its share, a scan makes first rows of the counts, then each warp places its slots in order.
#pragma once
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/scan.cuh"
#include "fi/fused_moe/moe_sort.h"

namespace fi {

// The lanes with the expert of this one, of numbers of so many bits; all without one (-1) have the same.
FI_DEVICE unsigned same_lanes(int expert, int bits) {
  unsigned same = __ballot_sync(0xffffffffu, expert >= 0);
  if (expert < 0) same = ~same;
  for (int b = 0; b < bits; ++b) {
    const bool set = expert >> b & 1;
    const unsigned lanes = __ballot_sync(0xffffffffu, set);
    same &= set ? lanes : ~lanes;
  }
  return same;
}

// kCluster: the CTAs of the grid are one cluster.
template <class Id, bool kCluster>
FI_DEVICE void moe_sort(const MoeSortParams& p) {
  constexpr int kSteps = kCluster ? 4 : 1;
  extern __shared__ uint4 bytes[];
  __shared__ int sums[kMoeSortWarps];
  int* counts = reinterpret_cast<int*>(bytes);  // [warps, experts]
  int* total = counts + p.warps * p.experts;    // [experts], of this CTA
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = p.experts;
  const unsigned rank = kCluster ? cluster_rank() : 0, ctas = kCluster ? cluster_size() : 1;
  const int first = static_cast<int>((rank * p.warps + warp)) * p.warp_slots;
  const int end = warp < p.warps ? min(first + p.warp_slots, p.slots) : first;
  for (int i = threadIdx.x; i < p.warps * experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  pdl_wait();
  pdl_launch_dependents();  // moe_experts begins with the ids, which are complete here

  // The local expert of a slot; -1: none.
  const auto expert_of = [&](int slot) {
    if (slot >= end) return -1;
    const int token = slot / p.top_k;
    const int64_t id = static_cast<int64_t>(static_cast<const Id*>(
                           p.ids)[token * p.ids_token_stride + (slot - token * p.top_k) * p.ids_slot_stride]) -
                       p.first_expert;
    return id >= 0 && id < experts ? static_cast<int>(id) : -1;
  };
  int* own = counts + warp * experts;
  for (int slot = first + lane; slot - lane < end; slot += 32 * kSteps) {  // kSteps loads in flight
    int expert[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) expert[i] = expert_of(slot + 32 * i);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (expert[i] >= 0) atomicAdd(own + expert[i], 1);
  }
  __syncthreads();

  // The counts of warps become sums of those before.
  const int e = threadIdx.x;
  int count = 0;
  if (e < experts) {
    for (int w = 0; w < p.warps; w += 8) {  // eight loads in flight
      int of_warp[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) of_warp[i] = w + i < p.warps ? counts[(w + i) * experts + e] : 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (w + i < p.warps) counts[(w + i) * experts + e] = count;
        count += of_warp[i];
      }
    }
    total[e] = count;
  }
  int all = count, before = 0;  // of all CTAs, and of those before this one
  if constexpr (kCluster) {
#if __CUDA_ARCH__ >= 900
    cluster_sync();
    if (e < experts) {
      all = 0;
      for (unsigned c = 0; c < ctas; ++c) {
        if (c == rank) before = all;
        all += static_cast<int>(cluster_load_u32(cluster_address(total + e, c)));
      }
    }
    cluster_sync();
#endif
  }
  if (e >= experts) all = 0;
  const int start = exclusive_sum<kMoeSortWarps>(all, sums);
  const int number = exclusive_sum<kMoeSortWarps>(all > 0, sums);
  if (e < experts) {
    total[e] = start + before;
    if (rank == 0) {
      p.offsets[e] = start;
      if (all > 0) p.active[1 + number] = e;
    }
  }
  if (e == experts) {
    sums[0] = start, sums[1] = number;
    if (rank == 0) p.offsets[e] = start, p.active[0] = number;
  }
  __syncthreads();
  const int rows = sums[0], actives = sums[1];
  for (int i = actives + threadIdx.x; rank == 0 && i < experts; i += blockDim.x) p.active[1 + i] = -1;
  for (int i = rows + static_cast<int>(rank * blockDim.x + threadIdx.x); i < p.slots; i += ctas * blockDim.x)
    p.rows[i] = -1;
  const int bits = 32 - __clz(experts - 1);
  for (int i = threadIdx.x; rank == 0 && i < p.zeros_count; i += blockDim.x) p.zeros[i] = 0;

  for (int slot = first + lane; slot - lane < end; slot += 32 * kSteps) {
    int expert[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) expert[i] = expert_of(slot + 32 * i);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const unsigned same = same_lanes(expert[i], bits);
      const int at = __popc(same & ((1u << lane) - 1)), own_slot = slot + 32 * i;
      int row = -1;
      if (expert[i] >= 0) row = total[expert[i]] + own[expert[i]] + at;
      __syncwarp();
      if (expert[i] >= 0 && at == 0) own[expert[i]] += __popc(same);
      __syncwarp();
      if (own_slot < end) p.positions[own_slot] = row;
      if (row >= 0) p.rows[row] = own_slot / p.top_k;
    }
  }
}

}  // namespace fi
