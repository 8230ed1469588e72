// Defines how the CTAs of an sm_90 cluster exchange data through distributed shared memory.
#pragma once
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/mbarrier_sm90.cuh"
#include "fi/sampling/cluster.cuh"

namespace fi {
namespace sampling {

struct CtaCluster {
  static constexpr unsigned kMaxCtas = 16;
  FI_DEVICE static unsigned rank() { return cluster_rank(); }
  FI_DEVICE static unsigned size() { return cluster_size(); }
  // Arrives at the cluster barrier without release semantics: earlier writes need not be visible.
  FI_DEVICE static void arrive_relaxed() {
    __syncwarp();
    cluster_arrive_relaxed();
  }
  // Waits for all CTAs to arrive. The barrier instructions require a converged warp.
  FI_DEVICE static void wait() {
    __syncwarp();
    cluster_wait();
  }
  FI_DEVICE static void sync() {
    __syncwarp();
    cluster_sync();
  }
  FI_DEVICE static uint4 read(const BucketCounter& x, unsigned rank) {
    return cluster_load_u32x4(cluster_address(&x, rank));
  }
  FI_DEVICE static uint32_t read(const uint32_t& x, unsigned rank) {
    return cluster_load_u32(cluster_address(&x, rank));
  }
  FI_DEVICE static void write(uint32_t& to, unsigned rank, uint32_t x) {
    cluster_store_u32(cluster_address(&to, rank), x);
  }
  FI_DEVICE static void write(uint64_t& to, unsigned rank, uint64_t x) {
    cluster_store_u64(cluster_address(&to, rank), x);
  }
  // An mbarrier that counts the bytes of remote stores, so that the receiver needs no fence and no cluster barrier. A
  // cluster of one CTA stores directly: such stores require a remote CTA.
  struct TransactionBarrier {
    Barrier barrier;
    FI_DEVICE void init() {  // one thread calls it, before the cluster barrier
      barrier.init(1);
      fence_barrier_init();
    }
    // One thread calls it, after the cluster barrier. Stores of other CTAs may arrive earlier.
    FI_DEVICE void expect(unsigned bytes) { barrier.arrive_expect(bytes); }
    FI_DEVICE void send(TileSum& to, unsigned rank, uint4 x) {
      if (size() == 1)
        *reinterpret_cast<uint4*>(&to) = x;
      else
        cluster_send_u32x4(cluster_address(&to, rank), x, cluster_address(&barrier, rank));
    }
    FI_DEVICE void send(uint64_t& to, unsigned rank, uint64_t x) {
      if (size() == 1)
        to = x;
      else
        cluster_send_u64(cluster_address(&to, rank), x, cluster_address(&barrier, rank));
    }
    FI_DEVICE void wait() {
      if (size() == 1)
        __syncthreads();
      else
        barrier.wait(0);
    }
  };
  // A CTA caches at most 2^16 elements, so the sums of the 16-bit halves of their weights fit into 32 bits, and no
  // atomic returns a value.
  static constexpr int kHighShift = 16;
  FI_DEVICE static void add(BucketCounter& to, uint32_t weight) {
    atomicAdd(&to.count, 1u);
    if (weight & 0xffff) atomicAdd(&to.low, weight & 0xffff);
    if (weight >> 16) atomicAdd(&to.high, weight >> 16);
  }
};

}  // namespace sampling
}  // namespace fi
