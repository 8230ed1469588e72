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
FI_DEVICE void copy_scales(const KvScales& scales, int64_t page, int64_t v_page, int64_t slot, int kv_head, bool inside,
                           uint8_t* k, uint8_t* v) {
  const uint8_t* from_k = scales.k + page * scales.k_page + slot * scales.k_token + kv_head * scales.k_head;
  const uint8_t* from_v = scales.v + v_page * scales.v_page + slot * scales.v_token + kv_head * scales.v_head;
  cp_async_small<kDim / 16>(k, from_k, inside);
  cp_async_small<kDim / 16>(v, from_v, inside);
}

// Whether the scales of a head's keys in a page follow each other, at multiples of 16 bytes for every four keys.
template <int kDim>
FI_DEVICE bool scales_are_dense(const KvScales& x) {
  const auto bits = reinterpret_cast<uint64_t>(x.k) | reinterpret_cast<uint64_t>(x.v) |
                    static_cast<uint64_t>(x.k_page | x.v_page | x.k_head | x.v_head);
  return bits % 16 == 0 && x.k_token == kDim / 16 && x.v_token == kDim / 16;
}

// Starts copies of the scales of four keys, the first at `from`, `token` bytes apart; of those outside of [low, high)
// it writes zeros.
template <int kDim>
FI_DEVICE void copy_four_scales(uint8_t* to, const uint8_t* from, int64_t token, bool dense, int low, int high) {
  constexpr int kBytes = kDim / 16;
  if (dense && low <= 0 && high >= 4) {
#pragma unroll
    for (int i = 0; i < 4 * kBytes; i += 16) cp_async_16(to + i, from + i);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) cp_async_small<kBytes>(to + i * kBytes, from + i * token, i >= low && i < high);
}

}  // namespace fi
