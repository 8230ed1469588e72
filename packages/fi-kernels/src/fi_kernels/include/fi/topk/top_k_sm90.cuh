// top_k by clusters of blocks: their shared memory together holds the row, which bulk copies bring in.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/topk/top_k.cuh"

namespace fi {

struct ClusterOfBlocks {
  static constexpr bool kBulk = true;
  FI_DEVICE static unsigned rank() { return cluster_rank(); }
  FI_DEVICE static unsigned size() { return cluster_size(); }
  FI_DEVICE static void sync() {
    __syncwarp();  // the instructions want the warp together
    cluster_sync();
  }
  FI_DEVICE static uint4 load4(const uint32_t* p, unsigned rank) {
    return cluster_load_u32x4(cluster_address(p, rank));
  }
  FI_DEVICE static void store4(uint32_t* p, unsigned rank, uint4 x) {
    cluster_store_u32x4(cluster_address(p, rank), x);
  }
  FI_DEVICE static void store(uint64_t* p, unsigned rank, uint64_t x) {
    cluster_store_u64(cluster_address(p, rank), x);
  }

  // Vectors of a part that arrives on its own barrier.
  FI_DEVICE static int chunk(int held) { return max((held + kTopKChunks - 1) / kTopKChunks, 1024); }
  FI_DEVICE static Barrier& barrier(TopKShared& shared, int chunk) {
    return reinterpret_cast<Barrier*>(shared.barriers)[chunk];
  }
  FI_DEVICE static void await(TopKShared& shared, int chunk) { barrier(shared, chunk).wait(0); }
  FI_DEVICE static void start(TopKShared& shared) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kTopKChunks; ++i) barrier(shared, i).init(1);
      fence_barrier_init();
    }
  }
  // Asks for all whole vectors that are held; partial ones are read by threads.
  template <class T>
  FI_DEVICE static void fetch(const Slice<T>& slice, TopKShared& shared) {
    if (threadIdx.x != 0) return;
    const int each = chunk(slice.held);
    for (int c = 0; c * each < slice.held; ++c) {
      const int first = max(c * each, slice.whole_begin());
      const int last = max(min((c + 1) * each, min(slice.held, slice.whole_end())), first);
      const unsigned bytes = (last - first) * 16;
      barrier(shared, c).arrive_expect(bytes);
      if (bytes)
        bulk_load(slice.shared + first, slice.from + static_cast<int64_t>(first) * Slice<T>::kVec, bytes,
                  barrier(shared, c));
    }
    const int rest = slice.whole_end() - max(slice.held, slice.whole_begin());
    if (rest > 0)
      bulk_prefetch(slice.from + static_cast<int64_t>(max(slice.held, slice.whole_begin())) * Slice<T>::kVec,
                    rest * 16);
  }
};

template <class T, int kThreads>
FI_DEVICE void top_k_cluster(const TopKParams& p) {
  extern __shared__ __align__(128) char memory[];
  TopK<T, ClusterOfBlocks, kThreads>(p, memory).run();
}

}  // namespace fi
