// Teams on sm_90: the blocks of a cluster.
#pragma once
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/sampling/team.cuh"

namespace fi {
namespace sampling {

struct Cluster {
  static constexpr unsigned kLargest = 16;
  FI_DEVICE static unsigned rank() { return cluster_rank(); }
  FI_DEVICE static unsigned size() { return cluster_size(); }
  FI_DEVICE static void arrive() { cluster_arrive(); }
  // The instructions want the warp together. The blocks arrived when their copies were on the way.
  FI_DEVICE static void meet() {
    __syncwarp();
    cluster_wait();
  }
  FI_DEVICE static void sync() {
    __syncwarp();
    cluster_sync();
  }
  FI_DEVICE static uint4 read(const Counter& x, unsigned rank) { return cluster_load_u32x4(cluster_address(&x, rank)); }
  FI_DEVICE static uint32_t read(const uint32_t& x, unsigned rank) {
    return cluster_load_u32(cluster_address(&x, rank));
  }
  FI_DEVICE static void write(uint32_t& to, unsigned rank, uint32_t x) {
    cluster_store_u32(cluster_address(&to, rank), x);
  }
  FI_DEVICE static void write(uint64_t& to, unsigned rank, uint64_t x) {
    cluster_store_u64(cluster_address(&to, rank), x);
  }
  FI_DEVICE static void give(PieceSum& to, uint4 x) { cluster_store_u32x4(cluster_address(&to, 0), x); }
  FI_DEVICE static bool gathered() {
    __syncwarp();
    cluster_arrive();
    if (rank() != 0) return false;
    cluster_wait();
    return true;
  }
  // A block holds at most 2^16 elements, so halves of their weights add up in a word, and nothing waits for an answer.
  static constexpr int kHighAt = 16;
  FI_DEVICE static void add(Counter& to, uint32_t weight) {
    atomicAdd(&to.count, 1u);
    if (weight & 0xffff) atomicAdd(&to.low, weight & 0xffff);
    if (weight >> 16) atomicAdd(&to.high, weight >> 16);
  }
};

}  // namespace sampling
}  // namespace fi
