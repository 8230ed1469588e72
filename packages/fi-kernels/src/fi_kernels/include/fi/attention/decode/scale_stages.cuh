// The scales of NVFP4 keys and values in shared memory, and their copies, which are too small for TMA.
#pragma once
#include "fi/attention/vec8.cuh"
#include "fi/cuda/ptx/cp_async.cuh"

namespace fi {

// The scales of kStages stages of kKeys NVFP4 keys and values of kDim elements; empty for other types.
template <class KV, int kDim, int kKeys, int kStages>
struct ScaleStages {
  FI_DEVICE uint8_t* k_scales(int) const { return nullptr; }
  FI_DEVICE uint8_t* v_scales(int) const { return nullptr; }
};
template <int kDim, int kKeys, int kStages>
struct ScaleStages<E2m1, kDim, kKeys, kStages> {
  alignas(16) uint8_t of_k[kStages][kKeys * kDim / 16], of_v[kStages][kKeys * kDim / 16];
  FI_DEVICE uint8_t* k_scales(int stage) { return of_k[stage]; }
  FI_DEVICE uint8_t* v_scales(int stage) { return of_v[stage]; }
};

// Starts copies of the kDim / 16 scales of a key and of its value, or writes zeros if it is not `inside`.
template <int kDim>
FI_DEVICE void copy_scales(const KvScales& scales, int64_t page, int slot, int kv_head, bool inside, uint8_t* k,
                           uint8_t* v) {
  const uint8_t* from_k = scales.k + page * scales.k_page + slot * scales.k_token + kv_head * scales.k_head;
  const uint8_t* from_v = scales.v + page * scales.v_page + slot * scales.v_token + kv_head * scales.v_head;
  cp_async_small<kDim / 16>(k, from_k, inside);
  cp_async_small<kDim / 16>(v, from_v, inside);
}

}  // namespace fi
