// Thread block clusters (PTX ISA 9.7.13.4, 9.7.9.22): rank, barrier, and shared memory of the other CTAs.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

FI_DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
FI_DEVICE unsigned cluster_size() {
  unsigned size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// The cluster of a grid of one dimension.
FI_DEVICE unsigned cluster_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// A barrier of all threads of the cluster in two halves: what was written before arrive is seen after wait.
FI_DEVICE void cluster_arrive() {
  delay<kDelayBarriers>();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same without the order of memory, which takes a fence of the device: it tells that this CTA runs.
FI_DEVICE void cluster_arrive_relaxed() {
  delay<kDelayBarriers>();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
FI_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  delay<kDelayBarriers>();
}
FI_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address of the same variable in the shared memory of another CTA, for the functions below.
FI_DEVICE unsigned cluster_address(const void* shared, unsigned rank) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "r"(rank));
  return remote;
}

FI_DEVICE uint32_t cluster_load_u32(unsigned address) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
FI_DEVICE uint4 cluster_load_u32x4(unsigned address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
FI_DEVICE void cluster_store_u32(unsigned address, uint32_t x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
FI_DEVICE void cluster_store_u64(unsigned address, uint64_t x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}
FI_DEVICE void cluster_store_u32x4(unsigned address, uint4 x) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
// Stores to another CTA that complete their bytes on a barrier of that CTA (PTX ISA, st.async).
FI_DEVICE void cluster_send_u64(unsigned address, uint64_t x, unsigned barrier) {
  delay<kDelayCopies>();
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(x),
               "r"(barrier)
               : "memory");
}
FI_DEVICE void cluster_send_u32x4(unsigned address, uint4 x, unsigned barrier) {
  delay<kDelayCopies>();
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier)
      : "memory");
}
FI_DEVICE void cluster_send_f32x4(unsigned address, float4 x, unsigned barrier) {
  delay<kDelayCopies>();
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}
FI_DEVICE void cluster_send_f32x2(unsigned address, float2 x, unsigned barrier) {
  delay<kDelayCopies>();
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
}

}  // namespace fi
