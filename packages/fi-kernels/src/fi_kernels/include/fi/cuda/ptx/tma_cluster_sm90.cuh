// cp.async.bulk.tensor with multicast (PTX ISA 9.7.9.25.5) of boxes of three dimensions, with a hint for L2.
#pragma once
#include "fi/cuda/ptx/tma_sm90.cuh"

namespace fi {

FI_DEVICE void tma_load_hinted(void* shared, const TensorMap& map, Barrier& barrier, uint64_t policy, int x0, int x1,
                               int x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2), "l"(policy)
      : "memory");
}

// To the same place in every CTA of the cluster whose bit is set; the bytes complete on the barrier of each.
FI_DEVICE void tma_load_multicast(void* shared, const TensorMap& map, Barrier& barrier, uint16_t ctas, uint64_t policy,
                                  int x0, int x1, int x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2), "h"(ctas), "l"(policy)
      : "memory");
}

}  // namespace fi
