// Batch prefill of 16-bit queries over fp8 keys and values on Hopper: the 16-bit kernel with warps that convert KV
// tiles in place, between the copies and the consumers.
#pragma once
#include "fi/attention/prefill/batch_prefill_gathered_sm90.cuh"  // the other kernel of the unit
#include "fi/attention/prefill/batch_prefill_sm90.cuh"
#include "fi/cuda/ptx/fp8.cuh"

namespace fi {

// bf16 queries become half, since an instruction makes two fp8 numbers half and four make them bf16.
// An fp8 tile is copied into the stage where it becomes a 16-bit one: blocks of 128 columns, [keys][128] in the
// 128-byte swizzle, of which the last may be half used. A block lies where the last 16-bit block that it becomes will
// be, so a row of it becomes rows of which only the last takes its place. kConverters: two warps beside the producers,
// or a warpgroup.
template <class Query, class KV, int kDimQK, int kDimVO, int kKeys, bool kCapped, int kConsumers, int kConverters>
struct PrefillMixedKernel {
  using T = __half;
  using Wide = PrefillKernel<T, kDimQK, kDimVO, kKeys, false, kCapped, kConsumers, 226 * 1024, true, Query>;
  static constexpr int kStages = Wide::kStages, kBlockBytes = kKeys * 128;
  static constexpr bool kWarpgroupConverts = kConverters == 4;
  static constexpr int kOthers = kWarpgroupConverts ? 2 : 1;  // warpgroups besides consumers
  static constexpr int kOtherRegisters = kWarpgroupConverts ? 32 : Wide::kProducerRegisters;
  static constexpr int kConsumerRegisters = kWarpgroupConverts ? 224 : Wide::kConsumerRegisters;
  static_assert(registers_fit(kOthers* kOtherRegisters + kConsumers * kConsumerRegisters, kConsumers + kOthers),
                "registers");

  struct Shared {
    typename Wide::Shared wide;
    // Filled by TMA; consumers free the stage.
    Pipeline<kStages, Writer::kCopies, Reader::kLoads> raw_keys, raw_values;
  };

  const BatchPrefillParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const Wide wide(p, shared.wide);
    if (threadIdx.x == 0) {
      shared.raw_keys.init(1, 1);
      shared.raw_values.init(1, 1);
      wide.init(1 + kConverters, kConverters);
    }
    __syncthreads();
    pdl_wait();
    wide.prefetch_schedule();
    const int group = warpgroup_index();
    if (group < kOthers) {
      give_registers<kOtherRegisters>();
      const int warp = warp_index(), part = warp - (kWarpgroupConverts ? 4 : 1);
      const Producers producers{p, shared.wide};
      if (warp == 3)
        producers.schedule(true);
      else if (warp == 0)
        produce(producers);
      else if (part >= 0)
        convert_all(producers, part);
    } else {
      take_registers<kConsumerRegisters>();
      wide.consume(group - kOthers);
    }
  }

 private:
  using Producers = typename Wide::Producers;
  using Tile = typename Wide::Tile;

  // Where the first block lies in its stage, and the bytes from it to the next.
  template <int kDim>
  static constexpr int kFirstBlock = kDim > 64 ? kBlockBytes : 0;
  template <int kDim>
  static constexpr int kNextBlock = kDim == 192 ? kBlockBytes : 2 * kBlockBytes;

  template <int kDim>
  FI_DEVICE static KV* raw(T* tile) {
    return reinterpret_cast<KV*>(tile) + kFirstBlock<kDim>;
  }

  // Copies keys and values of every tile, last key tile first.
  FI_DEVICE void produce(const Producers& producers) const {
    producers.produce_pairs([&](const Tile& tile, int j, unsigned step, int2 box) {
      const auto at = PipelineState::producer_at<kStages>(step);
      shared.wide.k_pipeline.acquire(at);
      producers.template copy_boxes<(kDimQK + 127) / 128 * 128, kNextBlock<kDimQK>>(
          p.copies.k, raw<kDimQK>(shared.wide.k[at.stage]), shared.raw_keys.full[at.stage], tile, j, box, false);
      shared.wide.v_pipeline.acquire(at);
      producers.template copy_boxes<(kDimVO + 127) / 128 * 128, kNextBlock<kDimVO>>(
          p.copies.v, raw<kDimVO>(shared.wide.v[at.stage]), shared.raw_values.full[at.stage], tile, j, box, true);
    });
  }

  FI_DEVICE static uint4 widened(uint2 x) {
    return {halves(x.x, KV()), upper_halves(x.x, KV()), halves(x.y, KV()), upper_halves(x.y, KV())};
  }

  FI_DEVICE void convert_all(const Producers& producers, int part) const {
    const Lane<16> whole(part);
    const Lane<8> half(part);
    producers.for_each_tile([&, step = 0u](const Tile& tile) mutable {
      int keys = tile.request.kv_len - tile.key(tile.begin + tile.count - 1);  // of the KV tile and behind it
      for (int left = tile.count; left > 0; --left, ++step, keys += kKeys) {
        const auto at = PipelineState::consumer_at<kStages>(step);
        shared.raw_keys.wait(at);
        convert<kDimQK>(shared.wide.k[at.stage], whole, half);
        shared.wide.k_pipeline.commit_warp(at.stage);
        shared.raw_values.wait(at);
        convert<kDimVO>(shared.wide.v[at.stage], whole, half);
        if (keys < kKeys) clear(shared.wide.v[at.stage], keys, part);
        shared.wide.v_pipeline.commit_warp(at.stage);
      }
    });
  }

  // A lane converts one of kPieces pieces of 8 columns in every 16th row, since places in the swizzle repeat with 8
  // rows. The bytes where it reads and writes in row `part`; those of row part + i, where kConverters divides i, differ
  // by a xor with 16 i.
  template <int kPieces>
  struct Lane {
    int from, to;

    FI_DEVICE explicit Lane(int part) {
      const int lane = threadIdx.x % 32, piece = lane % kPieces;
      const int row = part + lane / 16 * 8 + (kPieces == 8 ? lane / 8 % 2 * 4 : 0);
      from = swizzled_offset(row, piece / 2) + piece % 2 * 8;
      to = piece / 8 * kBlockBytes + swizzled_offset(row, piece % 8);
    }
  };

  template <int kDim>
  FI_DEVICE static void convert(T* tile, const Lane<16>& whole, const Lane<8>& half) {
    constexpr int kLast = (kDim / 64 - 1) * kBlockBytes;
    char* const begin = reinterpret_cast<char*>(tile);
    if constexpr (kDim >= 128) convert_blocks<16, kDim / 128>(begin + kBlockBytes, begin, whole);
    if constexpr (kDim % 128 > 0) convert_blocks<8, 1>(begin + kLast, begin + kLast, half);
  }
  // A row is read whole before its place is written, and no other warp has any of it.
  template <int kPieces, int kBlocks>
  FI_DEVICE static void convert_blocks(const char* raw, char* wide, const Lane<kPieces>& lane) {
    static_assert(kKeys % 16 == 0, "whole steps");
#pragma unroll 1
    for (int i = 0; i < kPieces / 2; i += kConverters) {
      const char* from = raw + (lane.from ^ i * 16) + i * 128;
      char* to = wide + (lane.to ^ i * 16) + i * 128;
      uint2 x[kBlocks][kKeys / 16];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n)
          x[block][n] = *reinterpret_cast<const uint2*>(from + block * 2 * kBlockBytes + n * 2048);
      __syncwarp();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n)
          *reinterpret_cast<uint4*>(to + block * 2 * kBlockBytes + n * 2048) = widened(x[block][n]);
    }
  }
  // Zeros value rows from `keys` on, which may be NaN: those that this warp has converted.
  FI_DEVICE static void clear(T* v, int keys, int part) {
    const int piece = threadIdx.x % 32;
    __syncwarp();
    for (int row = part; row < kKeys; row += kConverters)
      if (row >= keys && piece < kDimVO / 8)
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(v) + piece / 8 * kBlockBytes + row * 128 + piece % 8 * 16) =
            uint4{0, 0, 0, 0};
  }
};

template <class Query, class KV, int kDimQK, int kDimVO, int kKeys, bool kCapped, int kConsumers, int kConverters,
          int kSharedBytes>
FI_DEVICE void batch_prefill_wgmma_mixed(const BatchPrefillParams& params) {
  using Kernel = PrefillMixedKernel<Query, KV, kDimQK, kDimVO, kKeys, kCapped, kConsumers, kConverters>;
  run_in_shared<Kernel, kSwizzlePeriod, kSharedBytes>(params);
}

}  // namespace fi
