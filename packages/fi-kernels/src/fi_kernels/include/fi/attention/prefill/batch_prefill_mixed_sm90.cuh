// Batch prefill of 16-bit queries over fp8 keys and values on Hopper: the 16-bit kernel, and a warpgroup between copies
// and products that converts tiles.
#pragma once
#include "fi/attention/prefill/batch_prefill_sm90.cuh"
#include "fi/cuda/ptx/fp8.cuh"

namespace fi {

template <class T, class KV, int kKeys, bool kCapped>
struct PrefillMixedKernel {
  static constexpr int kDim = 128, kStages = 2;
  static constexpr int kProducerRegisters = 40, kConverterRegisters = 40, kConsumerRegisters = 216;
  // A block begins with 128 registers a thread; more would wait for ever.
  static_assert(kProducerRegisters + kConverterRegisters + 2 * kConsumerRegisters <= 4 * 128, "registers");

  using Wide = PrefillKernel<T, kDim, kDim, kKeys, false, kCapped, 2, 226 * 1024 - 2 * kStages * kKeys * kDim>;
  static_assert(Wide::kStages == kStages, "a stage is converted into the same");

  // Tiles as they come, [keys][128] in the 128-byte swizzle.
  struct Shared {
    alignas(1024) KV k[kStages][kKeys * kDim];
    alignas(1024) KV v[kStages][kKeys * kDim];
    typename Wide::Shared wide;
    Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  };

  const BatchPrefillParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const Wide wide(p, shared.wide);
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        shared.k_full[s].init(1);
        shared.v_full[s].init(1);
        shared.k_empty[s].init(4);
        shared.v_empty[s].init(4);
      }
      wide.init(3 + 4, 4);
    }
    __syncthreads();
    pdl_wait();
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (group == 0) {
      give_registers<kProducerRegisters>();
      const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      const typename Wide::Producers producers{p, shared.wide};
      if (warp == 0)
        producers.template produce<kDim>(p.k, shared.k, shared.k_full, shared.k_empty);
      else if (warp == 1)
        producers.template produce<kDim>(p.v, shared.v, shared.v_full, shared.v_empty);
      else if (warp == 2 && threadIdx.x % 32 == 0)
        producers.produce_queries();
      else if (warp == 3)
        producers.template schedule<false>();
    } else if (group == 1) {
      give_registers<kConverterRegisters>();
      convert_all();
    } else {
      take_registers<kConsumerRegisters>();
      wide.consume(group - 2);
    }
  }

 private:
  FI_DEVICE void convert_all() const {
    int stage = 0, parity = 0;
    for (int use = 0;; ++use) {
      shared.wide.work_full[use % 2].wait(use / 2 % 2);
      const typename Wide::Tile tile(p, shared.wide.work[use % 2]);
      if (tile.tokens == 0) break;
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.wide.work_empty[use % 2].arrive();
      // Keys of a tile are wanted a step before its values.
      for (int j = 0; j < tile.count; ++j) {
        convert(shared.k, shared.k_full, shared.k_empty, shared.wide.k, shared.wide.k_full, shared.wide.k_empty, stage,
                parity);
        convert(shared.v, shared.v_full, shared.v_empty, shared.wide.v, shared.wide.v_full, shared.wide.v_empty, stage,
                parity);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
  }

  // A thread takes 8 columns of every eighth key.
  FI_DEVICE static void convert(const KV (&from)[kStages][kKeys * kDim], Barrier (&full)[kStages],
                                Barrier (&empty)[kStages], T (&to)[kStages][kKeys * kDim], Barrier (&to_full)[kStages],
                                Barrier (&to_empty)[kStages], int stage, int parity) {
    const int key = threadIdx.x % 128 / 16, piece = threadIdx.x % 16;
    const char* source =
        reinterpret_cast<const char*>(from[stage]) + key * 128 + (((piece / 2) ^ key) * 2 + piece % 2) * 8;
    char* target = reinterpret_cast<char*>(to[stage]) + piece / 8 * kKeys * 128 + key * 128 + ((piece % 8) ^ key) * 16;
    full[stage].wait(parity);
    to_empty[stage].wait(parity ^ 1);
#pragma unroll 4
    for (int first = 0; first < kKeys; first += 8) {
      const uint2 x = *reinterpret_cast<const uint2*>(source + first * 128);
      *reinterpret_cast<uint4*>(target + first * 128) = {widened(x.x, KV(), T()), widened(x.x >> 16, KV(), T()),
                                                         widened(x.y, KV(), T()), widened(x.y >> 16, KV(), T())};
    }
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      empty[stage].arrive();
      to_full[stage].arrive();
    }
  }
};

template <class T, class KV, int kKeys, bool kCapped, int kSharedBytes>
FI_DEVICE void batch_prefill_mixed(const BatchPrefillParams& params) {
  run_aligned<PrefillMixedKernel<T, KV, kKeys, kCapped>, kSharedBytes>(params);
}

}  // namespace fi
