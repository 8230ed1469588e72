// Teams on sm_90: the blocks of a cluster.
#pragma once
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/mbarrier_sm90.cuh"
#include "fi/sampling/team.cuh"

namespace fi {
namespace sampling {

struct Cluster {
  static constexpr unsigned kLargest = 16;
  FI_DEVICE static unsigned rank() { return cluster_rank(); }
  FI_DEVICE static unsigned size() { return cluster_size(); }
  FI_DEVICE static void arrive() { cluster_arrive(); }
  // As arrive, but nothing that was written before is seen.
  FI_DEVICE static void appear() {
    __syncwarp();
    cluster_arrive_relaxed();
  }
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
  // What blocks give to each other, so many bytes for each that waits. No fence and no barrier of the cluster: the
  // stores count themselves. A block alone cannot have such stores.
  struct Gathering {
    Barrier barrier;
    FI_DEVICE void begin(unsigned bytes) {  // by one thread, before the cluster meets
      barrier.init(1);
      barrier.arrive_expect(bytes);
      fence_barrier_init();
    }
    FI_DEVICE void give(PieceSum& to, unsigned rank, uint4 x) {
      if (size() == 1)
        *reinterpret_cast<uint4*>(&to) = x;
      else
        cluster_send_u32x4(cluster_address(&to, rank), x, cluster_address(&barrier, rank));
    }
    FI_DEVICE void give(uint64_t& to, unsigned rank, uint64_t x) {
      if (size() == 1)
        to = x;
      else
        cluster_send_u64(cluster_address(&to, rank), x, cluster_address(&barrier, rank));
    }
    FI_DEVICE void await() {
      if (size() == 1)
        __syncthreads();
      else
        barrier.wait(0);
    }
  };
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
