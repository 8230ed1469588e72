// Batch prefill of 16-bit queries over fp8 keys and values on Hopper: the 16-bit kernel with a warpgroup that converts
// KV tiles between the TMA producers and the consumers.
#pragma once
#include "fi/attention/prefill/batch_prefill_sm90.cuh"
#include "fi/cuda/ptx/fp8.cuh"

namespace fi {

template <class T, class KV, int kKeys, bool kCapped>
struct PrefillMixedKernel {
  static constexpr int kDim = 128, kStages = 2;
  static constexpr int kProducerRegisters = 40, kConverterRegisters = 40, kConsumerRegisters = 216;
  static_assert(registers_fit(kProducerRegisters + kConverterRegisters + 2 * kConsumerRegisters, 4), "registers");

  using Wide = PrefillKernel<T, kDim, kDim, kKeys, false, kCapped, 2, 226 * 1024 - 2 * kStages * kKeys * kDim>;
  static_assert(Wide::kStages == kStages, "a stage is converted into the stage of the same number");

  // fp8 tiles, [keys][128] in the 128-byte swizzle.
  struct Shared {
    alignas(1024) KV k[kStages][kKeys * kDim];
    alignas(1024) KV v[kStages][kKeys * kDim];
    typename Wide::Shared wide;
    Pipeline<kStages> k_pipeline, v_pipeline;
  };

  const BatchPrefillParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const Wide wide(p, shared.wide);
    if (threadIdx.x == 0) {
      shared.k_pipeline.init(p.gathered ? 32 : 1, 4);
      shared.v_pipeline.init(p.gathered ? 32 : 1, 4);
      wide.init(3 + 4, 4);
    }
    __syncthreads();
    pdl_wait();
    const int group = warpgroup_index();
    if (group == 0) {
      give_registers<kProducerRegisters>();
      const int warp = warp_index();
      const typename Wide::Producers producers{p, shared.wide};
      if (warp < 2)
        produce(producers, warp == 0);
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
  // Plain loads read the fp8 tiles, so that rows copied by cp.async need no relay.
  FI_DEVICE void produce(const typename Wide::Producers& producers, bool keys) const {
    auto& to = keys ? shared.k : shared.v;
    auto& pipeline = keys ? shared.k_pipeline : shared.v_pipeline;
    if (p.gathered)
      producers.template gather<kDim>(keys ? p.k_rows : p.v_rows, to, pipeline.full, pipeline.empty);
    else
      producers.template produce<kDim>(keys ? p.k : p.v, to, pipeline.full, pipeline.empty);
  }

  FI_DEVICE void convert_all() const {
    typename Wide::Producers{p, shared.wide}.for_each_tile(
        [this, at = PipelineState()](const typename Wide::Tile& tile) mutable {
          // Consumers need the keys of a KV tile before its values.
          for (int j = 0; j < tile.count; ++j) {
            convert(shared.k[at.stage], shared.k_pipeline, shared.wide.k[at.stage], shared.wide.k_pipeline, at);
            convert(shared.v[at.stage], shared.v_pipeline, shared.wide.v[at.stage], shared.wide.v_pipeline, at);
            at.advance(kStages);
          }
        });
  }

  // Each thread converts 8 columns of every eighth key.
  FI_DEVICE static void convert(const KV* from, Pipeline<kStages>& from_pipeline, T* to, Pipeline<kStages>& to_pipeline,
                                const PipelineState& at) {
    const int key = threadIdx.x % 128 / 16, piece = threadIdx.x % 16;
    const char* source = reinterpret_cast<const char*>(from) + swizzled_offset(key, piece / 2) + piece % 2 * 8;
    char* target = reinterpret_cast<char*>(to) + SwizzledTile<T, kKeys>::offset(key, piece * 8);
    from_pipeline.wait(at);
    to_pipeline.acquire({at.stage, at.phase ^ 1});
#pragma unroll 4
    for (int first = 0; first < kKeys; first += 8) {
      const uint2 x = *reinterpret_cast<const uint2*>(source + first * 128);
      *reinterpret_cast<uint4*>(target + first * 128) = {widened(x.x, KV(), T()), widened(x.x >> 16, KV(), T()),
                                                         widened(x.y, KV(), T()), widened(x.y >> 16, KV(), T())};
    }
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      from_pipeline.release(at.stage);
      to_pipeline.commit(at.stage);
    }
  }
};

template <class T, class KV, int kKeys, bool kCapped, int kSharedBytes>
FI_DEVICE void batch_prefill_wgmma_mixed(const BatchPrefillParams& params) {
  run_in_shared<PrefillMixedKernel<T, KV, kKeys, kCapped>, kSwizzlePeriod, kSharedBytes>(params);
}

}  // namespace fi
