// cp.async.bulk.tensor (PTX ISA 9.7.9.25.5): one thread copies a box of a tensor that a tensor map describes.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/tensor_map.h"

namespace fi {

// A map must be a member of the kernel's __grid_constant__ parameters.
FI_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Coordinates from the innermost dimension on. Elements outside of the tensor arrive as zeros.
FI_DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& barrier, int x0, int x1) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1)
      : "memory");
}
FI_DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& barrier, int x0, int x1, int x2) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
FI_DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& barrier, int x0, int x1, int x2, int x3) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
FI_DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& barrier, int x0, int x1, int x2, int x3, int x4) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

// To the same place of the CTAs of the cluster whose bits `ctas` has; the bytes complete on the barrier of each.
FI_DEVICE void tma_load_multicast(void* shared, const TensorMap& map, Barrier& barrier, uint16_t ctas, int x0, int x1,
                                  int x2) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5}], [%2], %6;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2), "h"(ctas)
      : "memory");
}

// With a hint for L2: kEvictFirst, kEvictNormal or kEvictLast.
FI_DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& barrier, int x0, int x1, int x2, int x3, int x4,
                        uint64_t policy) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5, %6, %7}], [%2], %8;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "l"(policy)
      : "memory");
}
FI_DEVICE void tma_load_hinted(void* shared, const TensorMap& map, Barrier& barrier, uint64_t policy, int x0, int x1,
                               int x2) {
  delay<kDelayCopies>();
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2), "l"(policy)
      : "memory");
}
// Prefetches a box into L2.
FI_DEVICE void tma_prefetch_hinted(const TensorMap& map, uint64_t policy, int x0, int x1, int x2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.L2::cache_hint [%0, {%1, %2, %3}], %4;" ::"l"(&map), "r"(x0),
               "r"(x1), "r"(x2), "l"(policy)
               : "memory");
}

// Shared memory to global, in this thread's current bulk group (bulk_commit, bulk_wait_read). What lies outside of the
// tensor is dropped.
FI_DEVICE void tma_store(const TensorMap& map, const void* shared, int x0, int x1, int x2) {
  delay<kDelayCopies>();
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "r"(x0), "r"(x1), "r"(x2)
               : "memory");
}

}  // namespace fi
