// Batch prefill of 16-bit queries over small pages of fp8 keys and values on Hopper: the 16-bit kernel with two warps
// that copy rows by cp.async, and a warpgroup that converts KV tiles between them and the consumers.
#pragma once
#include "fi/attention/prefill/batch_prefill_sm90.cuh"
#include "fi/cuda/ptx/fp8.cuh"

namespace fi {

// bf16 queries become half, since an instruction makes two fp8 numbers half and four make them bf16.
template <class Query, class KV, int kDimQK, int kDimVO, int kKeys, bool kCapped, int kConsumers, int kRawStages>
struct PrefillGatheredKernel {
  using T = __half;
  static constexpr int kStages = 2, kPaddedQK = (kDimQK + 127) / 128 * 128, kPaddedVO = (kDimVO + 127) / 128 * 128;
  static constexpr int kOtherRegisters = kConsumers > 2 ? (kDimVO > 64 ? 24 : 32) : kDimVO > 128 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers > 2 ? (kDimVO > 64 ? 144 : 136) : kDimVO > 128 ? 224 : 216;
  static_assert(registers_fit(2 * kOtherRegisters + kConsumers * kConsumerRegisters, kConsumers + 2), "registers");

  using Wide = PrefillKernel<T, kDimQK, kDimVO, kKeys, false, kCapped, kConsumers,
                             226 * 1024 - kRawStages * kKeys*(kPaddedQK + kPaddedVO), true, Query>;
  static_assert(Wide::kStages == kStages, "16-bit stages");

  // fp8 tiles, [dim / 128][keys][128] in the 128-byte swizzle, where the last block may be partly used. Plain loads
  // read them, so rows copied by cp.async need no relay.
  struct Shared {
    alignas(1024) KV k[kRawStages][kKeys * kPaddedQK];
    alignas(1024) KV v[kRawStages][kKeys * kPaddedVO];
    typename Wide::Shared wide;
    using RawPipeline = Pipeline<kRawStages, Writer::kThreads, Reader::kLoads>;
    RawPipeline k_pipeline, v_pipeline;
  };

  const BatchPrefillParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const Wide wide(p, shared.wide);
    if (threadIdx.x == 0) {
      shared.k_pipeline.init(32, 4);
      shared.v_pipeline.init(32, 4);
      wide.init(3 + 4, 4);
    }
    __syncthreads();
    pdl_wait();
    const int group = warpgroup_index();
    if (group == 0) {
      give_registers<kOtherRegisters>();
      const int warp = warp_index();
      const typename Wide::Producers producers{p, shared.wide};
      if (warp == 0)
        producers.template gather<kDimQK>(p.copies.k_rows, shared.k, shared.k_pipeline.full, shared.k_pipeline.empty,
                                          false);
      else if (warp == 1)
        producers.template gather<kDimVO>(p.copies.v_rows, shared.v, shared.v_pipeline.full, shared.v_pipeline.empty,
                                          true);
      else if (warp == 2)
        producers.produce_queries();
      else if (warp == 3)
        producers.schedule(false);
    } else if (group == 1) {
      give_registers<kOtherRegisters>();
      convert_all();
    } else {
      take_registers<kConsumerRegisters>();
      wide.consume(group - 2);
    }
  }

 private:
  FI_DEVICE void convert_all() const {
    typename Wide::Producers{p, shared.wide}.for_each_tile(
        [this, from = PipelineState(), at = PipelineState()](const typename Wide::Tile& tile) mutable {
          // Consumers need the keys of a KV tile before its values.
          for (int j = 0; j < tile.count; ++j) {
            convert<kDimQK>(shared.k[from.stage], shared.k_pipeline, from, shared.wide.k[at.stage],
                            shared.wide.k_pipeline, at);
            convert<kDimVO>(shared.v[from.stage], shared.v_pipeline, from, shared.wide.v[at.stage],
                            shared.wide.v_pipeline, at);
            from.advance(kRawStages);
            at.advance(kStages);
          }
        });
  }

  // A thread converts 8 columns of every kStep-th key. Their places in the swizzle repeat with 8 keys.
  template <int kDim>
  FI_DEVICE static void convert(const KV* raw, typename Shared::RawPipeline& raw_pipeline, const PipelineState& from,
                                T* to, typename Wide::TilePipeline& to_pipeline, const PipelineState& at) {
    raw_pipeline.wait(from);
    to_pipeline.acquire({at.stage, at.phase ^ 1});
    const char* source = reinterpret_cast<const char*>(raw);
    char* target = reinterpret_cast<char*>(to);
#pragma unroll
    for (int block = 0; block < kDim / 128; ++block)
      convert_columns<16>(source + block * kKeys * 128, target + block * kKeys * 256);
    if constexpr (kDim % 128 > 0)
      convert_columns<kDim % 128 / 8>(source + kDim / 128 * kKeys * 128, target + kDim / 128 * kKeys * 256);
    pass_on_warp(raw_pipeline, from.stage, to_pipeline, at.stage);
  }
  // kPieces: of 8 columns, of a line of 128 fp8 columns.
  template <int kPieces>
  FI_DEVICE static void convert_columns(const char* from, char* to) {
    constexpr int kStep = 128 / kPieces;
    static_assert(kStep % 8 == 0 && kKeys % kStep == 0, "whole steps of 8 keys");
    const int thread = threadIdx.x % 128, key = thread / kPieces, piece = thread % kPieces;
    from += swizzled_offset(key, piece / 2) + piece % 2 * 8;
    to += SwizzledTile<T, kKeys>::offset(key, piece * 8);
#pragma unroll 4
    for (int i = 0; i < kKeys / kStep; ++i, from += kStep * 128, to += kStep * 128) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      *reinterpret_cast<uint4*>(to) = {halves(x.x, KV()), upper_halves(x.x, KV()), halves(x.y, KV()),
                                       upper_halves(x.y, KV())};
    }
  }
};

template <class Query, class KV, int kDimQK, int kDimVO, int kKeys, bool kCapped, int kConsumers, int kRawStages,
          int kSharedBytes>
FI_DEVICE void batch_prefill_wgmma_gathered(const BatchPrefillParams& params) {
  using Kernel = PrefillGatheredKernel<Query, KV, kDimQK, kDimVO, kKeys, kCapped, kConsumers, kRawStages>;
  run_in_shared<Kernel, kSwizzlePeriod, kSharedBytes>(params);
}

}  // namespace fi
