// Selects the k largest with a cluster whose shared memory together caches the row, loaded by bulk copies.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/topk/top_k.cuh"

namespace fi {

struct CtaCluster {
  static constexpr bool kAsync = true;
  FI_DEVICE static unsigned rank() { return cluster_rank(); }
  FI_DEVICE static unsigned size() { return cluster_size(); }
  FI_DEVICE static void sync() {
    __syncwarp();  // the barrier instructions require a converged warp
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

  // The number of vectors per bulk copy; each has its own barrier.
  FI_DEVICE static int chunk(int cached) { return max((cached + kTopKChunks - 1) / kTopKChunks, 1024); }
  FI_DEVICE static Barrier& barrier(TopKShared& shared, int chunk) {
    return reinterpret_cast<Barrier*>(shared.barriers)[chunk];
  }
  FI_DEVICE static void await(TopKShared& shared, int chunk) { barrier(shared, chunk).wait(0); }
  FI_DEVICE static void init_barriers(TopKShared& shared) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kTopKChunks; ++i) barrier(shared, i).init(1);
      fence_barrier_init();
    }
  }
  // Starts the bulk copies of all whole cached vectors; threads read the partial ones. Prefetches the others into L2.
  template <class T>
  FI_DEVICE static void load_async(const Slice<T>& slice, TopKShared& shared) {
    if (threadIdx.x != 0) return;
    const int each = chunk(slice.cached);
    for (int c = 0; c * each < slice.cached; ++c) {
      const int first = max(c * each, slice.whole_begin());
      const int last = max(min((c + 1) * each, min(slice.cached, slice.whole_end())), first);
      const unsigned bytes = (last - first) * 16;
      barrier(shared, c).arrive_expect(bytes);
      if (bytes)
        bulk_load(slice.shared + first, slice.data + static_cast<int64_t>(first) * Slice<T>::kVec, bytes,
                  barrier(shared, c));
    }
    const int rest = slice.whole_end() - max(slice.cached, slice.whole_begin());
    if (rest > 0)
      bulk_prefetch(slice.data + static_cast<int64_t>(max(slice.cached, slice.whole_begin())) * Slice<T>::kVec,
                    rest * 16);
  }
};

template <class T, int kThreads>
FI_DEVICE void top_k_cluster(const TopKParams& p) {
  extern __shared__ __align__(128) char memory[];
  TopK<T, CtaCluster, kThreads>(p, memory).run();
}

}  // namespace fi
