// GEMM on Hopper: persistent warp-specialised CTAs. A TMA warp fills a ring of operand tiles, a second warp brings the
// scales of blocks, and two consumer warpgroups multiply (wgmma) and store. Two CTAs of a cluster may share the tiles
// of one operand by multicast.
#pragma once
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/tma_cluster_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/gemm/gemm_epilogue_sm90.cuh"

namespace fi {

enum class GemmScales { kNone, kRows, kBlocks, kColumnBlocks };

FI_HOST_DEVICE constexpr int gemm_common_divisor(int a, int b) { return b == 0 ? a : gemm_common_divisor(b, a % b); }

// kMnMajorB: b is MN-major, which 16-bit operands may be. kRows x kColumns: of a tile. kWarpgroupsM: consumer
// warpgroups along m; the others are along n. kStages, kBuffers: of operands and, for each warpgroup, of out. kScales:
// kNone for 16-bit operands (alpha and scales of rows are multiplied in the epilogue), kRows for fp8, kBlocks for
// scales of 128 k and 1 or 128 rows of a and 128 rows of b, kColumnBlocks if each row of b has its own.
//
// The tensor cores add fp8 products with about 14 bits, so the products of each block of 128 k have accumulators of
// their own (`part`), which are added to those of the tile in fp32. While one warpgroup adds, the other multiplies.
template <class A, class B, class Out, bool kMnMajorB, int kRows, int kColumns, int kWarpgroupsM, int kStages,
          int kBuffers, GemmScales kScales, template <int, int> class Tiles>
struct GemmSm90 {
  static constexpr int kConsumers = 2, kBlockK = kSwizzleLineBytes / sizeof(A);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(registers_fit(kProducerRegisters + kConsumers * kConsumerRegisters, 1 + kConsumers), "registers");
  static constexpr bool kFp8 = sizeof(A) == 1, kBlockScales = kScales >= GemmScales::kBlocks;
  // Of a warpgroup.
  static constexpr int kOwnRows = kRows / kWarpgroupsM, kOwnColumns = kColumns * kWarpgroupsM / kConsumers;
  static constexpr int kMBlocks = kOwnRows / 64, kCount = kOwnColumns / 2;
  static constexpr int kTileBytes = (kRows + kColumns) * kSwizzleLineBytes;
  // An MN-major tile of b is [kColumns / 64][64 k][64 columns].
  static constexpr int kColumnBlockBytes = kBlockK * kSwizzleLineBytes;
  static_assert(!kMnMajorB || (!kFp8 && kOwnColumns % kBlockK == 0), "whole blocks of 64 columns");
  // Columns of a tile that have the same scale, wherever the tile begins.
  static constexpr int kScaleColumns = kScales == GemmScales::kColumnBlocks ? 1 : gemm_common_divisor(kOwnColumns, 128);
  static constexpr int kColumnScales = kBlockScales ? kColumns / kScaleColumns : 1;
  static constexpr int kRowScales = kBlockScales ? kRows : 1;

  using Scales = OutputScales<Out, !kBlockScales, kMBlocks, kOwnColumns>;

  struct Shared {
    alignas(1024) char a[kStages][kRows * kSwizzleLineBytes];
    alignas(1024) char b[kStages][kColumns * kSwizzleLineBytes];
    alignas(1024) char out[kConsumers][kBuffers][64 * kSwizzleLineBytes];
    alignas(16) float a_scale[kStages][kRowScales];
    alignas(16) float b_scale[kStages][kColumnScales];
    alignas(16) typename Scales::Shared scales[kConsumers];
    GemmTile tiles[kStages];  // of a stage that is the first of a tile
    Pipeline<kStages> pipeline;
  };

  static constexpr int kNoTile = -0x7fffffff;  // rows of the tile that ends the work

  const GemmSm90Params& p;
  Shared& shared;

  FI_DEVICE GemmSm90(const GemmSm90Params& params, Shared& s) : p(params), shared(s) {}

  FI_DEVICE void run() const {
    const int cluster = p.cluster_m * p.cluster_n;
    if (threadIdx.x == 0) {
      shared.pipeline.init(kBlockScales ? 1 + 32 : 1, kConsumers * 4 * cluster);
      fence_barrier_init();
      prefetch_tensor_map(p.a);
      prefetch_tensor_map(p.b);
      prefetch_tensor_map(p.out);
    }
    __syncthreads();
    if (cluster > 1) cluster_sync();
    pdl_wait();
    const int warpgroup = warpgroup_index();
    if (warpgroup == kConsumers) {
      give_registers<kProducerRegisters>();
      const int warp = warp_index() % 4;
      if (warp == 0)
        load_operands();
      else if (warp == 1 && kBlockScales)
        load_scales();
    } else {
      take_registers<kConsumerRegisters>();
      consume(warpgroup);
    }
    // A CTA stays while the other one may write its shared memory or arrive at its barriers.
    if (cluster > 1) {
      __syncwarp();
      cluster_sync();
    }
  }

 private:
  // By a warp; lane 0 copies.
  FI_DEVICE void load_operands() const {
    Tiles<kRows, kColumns> tiles(p);
    GemmTile tile;
    const int rank = p.cluster_m * p.cluster_n > 1 ? cluster_rank() : 0;
    const bool share_a = p.cluster_n > 1, share_b = p.cluster_m > 1;
    const int a_part = share_a ? rank * (kRows / 2) : 0, b_part = share_b ? rank * (kColumns / 2) : 0;
    const uint64_t b_policy = p.b_once ? kEvictFirst : kEvictNormal;
    PipelineState at = PipelineState::producer();
    while (tiles.next(tile)) {
      if (threadIdx.x % 32 == 0) {
        shared.pipeline.acquire(at);
        shared.tiles[at.stage] = tile;
        for (int k = 0; k < p.k_blocks; ++k) {
          shared.pipeline.acquire(at);
          Barrier& full = shared.pipeline.expect(at.stage, kTileBytes);
          load(shared.a[at.stage] + a_part * kSwizzleLineBytes, p.a, full, share_a, kEvictNormal, k * kBlockK,
               tile.row + a_part, tile.a_batch);
          if constexpr (kMnMajorB) {
            for (int c = share_b ? rank : 0; c < kColumns / kBlockK; c += share_b ? 2 : 1)
              load(shared.b[at.stage] + c * kColumnBlockBytes, p.b, full, share_b, b_policy, tile.column + c * kBlockK,
                   k * kBlockK, tile.b_batch);
          } else {
            load(shared.b[at.stage] + b_part * kSwizzleLineBytes, p.b, full, share_b, b_policy, k * kBlockK,
                 tile.column + b_part, tile.b_batch);
          }
          at.advance(kStages);
        }
      }
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) {
      shared.pipeline.acquire(at);
      shared.tiles[at.stage].rows = kNoTile;
      shared.pipeline.commit(at.stage);
    }
    __syncwarp();
    pdl_launch_dependents();
  }
  FI_DEVICE static void load(char* to, const TensorMap& map, Barrier& full, bool share, uint64_t policy, int column,
                             int row, int batch) {
    if (share)
      tma_load_multicast(to, map, full, 3, policy, column, row, batch);
    else
      tma_load_hinted(to, map, full, policy, column, row, batch);
  }

  // By a warp: the scales of a stage, one float at a time, since they may lie anywhere.
  FI_DEVICE void load_scales() const {
    const GemmProblem& q = p.problem;
    const int lane = threadIdx.x % 32;
    Tiles<kRows, kColumns> tiles(p);
    GemmTile tile;
    PipelineState at = PipelineState::producer();
    while (tiles.next(tile)) {
      constexpr int kA = kRows / 32, kB = (kColumnScales + 31) / 32;
      const float* a[kA];
      const float* b[kB];
      const int a_limit = tile.row + max(tile.rows, 1) - 1;
#pragma unroll
      for (int i = 0; i < kA; ++i) {
        const int row = min(tile.row + i * 32 + lane, a_limit);
        a[i] = q.a_scale + tile.a_batch * q.a_scale_batch_stride +
               (q.a_scale_rows == 1 ? row : row / 128) * q.a_scale_row_stride;
      }
#pragma unroll
      for (int i = 0; i < kB; ++i) {
        const int column = min(tile.column + (i * 32 + lane) * kScaleColumns, q.n - 1);
        b[i] = q.b_scale + tile.b_batch * q.b_scale_batch_stride +
               (kScales == GemmScales::kColumnBlocks ? column : column / 128) * q.b_scale_row_stride;
      }
      for (int k = 0; k < p.k_blocks; ++k) {
        shared.pipeline.acquire(at);
#pragma unroll
        for (int i = 0; i < kA; ++i) {
          cp_async_4(&shared.a_scale[at.stage][i * 32 + lane], a[i]);
          a[i] += q.a_scale_k_stride;
        }
#pragma unroll
        for (int i = 0; i < kB; ++i) {
          if (i * 32 + lane < kColumnScales) cp_async_4(&shared.b_scale[at.stage][i * 32 + lane], b[i]);
          b[i] += q.b_scale_k_stride;
        }
        shared.pipeline.commit_copies(at.stage);
        at.advance(kStages);
      }
    }
    shared.pipeline.acquire(at);
    shared.pipeline.commit(at.stage);
  }

  FI_DEVICE void consume(int warpgroup) const {
    PipelineState at;
    unsigned batch = 0;  // of staged blocks of out
    const int row = warpgroup % kWarpgroupsM * kOwnRows, column = warpgroup / kWarpgroupsM * kOwnColumns;
    const uint64_t a = wgmma_uniform(wgmma_operand(shared.a[0] + row * kSwizzleLineBytes, kSwizzlePeriod));
    const uint64_t b = wgmma_uniform(
        wgmma_operand(shared.b[0] + column * kSwizzleLineBytes, kSwizzlePeriod, kMnMajorB ? kColumnBlockBytes : 16));
    for (;;) {
      shared.pipeline.wait(at);
      const GemmTile tile = shared.tiles[at.stage];
      if (uniform(tile.rows) == kNoTile) break;
      const Scales scales(p.problem, tile, row, tile.column + column);
      float d[kMBlocks][kCount];
      if constexpr (kFp8 && kScales == GemmScales::kRows && kMBlocks == 1)
        multiply_in_long_parts(d[0], a, b, at);
      else if constexpr (kFp8)
        multiply_in_parts(d, a, b, row, column, at);
      else
        multiply(d, a, b, at);
      gemm_epilogue<Out, kBuffers>(p, d, scales, shared.out[warpgroup][0], batch, shared.scales[warpgroup], tile, row,
                                   tile.column + column, 1 + warpgroup);
    }
    if (threadIdx.x % kWarpgroup == 0) bulk_wait_read<0>();  // shared memory ends with the CTA
  }

  // By a warp, which no longer reads the stage.
  FI_DEVICE void release(int stage) const {
    const int cluster = p.cluster_m * p.cluster_n, lane = threadIdx.x % 32;
    __syncwarp();
    if (cluster == 1) {
      if (lane == 0) shared.pipeline.empty[stage].arrive();
    } else if (lane < 2) {
      shared.pipeline.empty[stage].arrive_remote(lane);
    }
  }

  // One m64 block times one stage; accumulators are added to, but for the first instruction if `add` is false.
  FI_DEVICE static void multiply_stage(float (&d)[kCount], uint64_t a, uint64_t b, bool add) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<kMnMajorB>(d, wgmma_further(a, step * 32),
                       wgmma_further(b, step * (kMnMajorB ? 16 * kSwizzleLineBytes : 32)), add || step > 0, A(), B());
  }

  FI_DEVICE void multiply(float (&d)[kMBlocks][kCount], uint64_t a, uint64_t b, PipelineState& at) const {
    int before = 0;
    for (int k = 0; k < p.k_blocks; ++k) {
      const uint64_t a_stage = wgmma_further(a, at.stage * sizeof(shared.a[0]));
      const uint64_t b_stage = wgmma_further(b, at.stage * sizeof(shared.b[0]));
      shared.pipeline.wait(at);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kMBlocks; ++i)
        multiply_stage(d[i], wgmma_further(a_stage, i * 64 * kSwizzleLineBytes), b_stage, k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (k > 0) release(before);
      before = at.stage;
      at.advance(kStages);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) wgmma_keep(d[i]);
    release(before);
  }

  // Without scales, the products of kPartBlocks blocks of k share accumulators where registers allow it: all of them
  // wait for the next blocks.
  FI_DEVICE void multiply_in_long_parts(float (&d)[kCount], uint64_t a, uint64_t b, PipelineState& at) const {
    constexpr int kPartBlocks = 2;
#pragma unroll
    for (int j = 0; j < kCount; ++j) d[j] = 0.f;
    for (int k = 0; k < p.k_blocks; k += kPartBlocks) {
      float part[kCount];
      int before = 0;
      const int blocks = min(p.k_blocks - k, kPartBlocks);
      for (int i = 0; i < blocks; ++i) {
        const uint64_t a_stage = wgmma_further(a, at.stage * sizeof(shared.a[0]));
        const uint64_t b_stage = wgmma_further(b, at.stage * sizeof(shared.b[0]));
        shared.pipeline.wait(at);
        wgmma_fence();
        multiply_stage(part, a_stage, b_stage, i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) release(before);
        before = at.stage;
        at.advance(kStages);
      }
      wgmma_wait<0>();
      wgmma_keep(part);
      release(before);
#pragma unroll
      for (int j = 0; j < kCount; ++j) d[j] += part[j];
    }
  }

  FI_DEVICE void multiply_in_parts(float (&d)[kMBlocks][kCount], uint64_t a, uint64_t b, int row, int column,
                                   PipelineState& at) const {
    const int own_row = row + wgmma_row(threadIdx.x % 128);
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kCount; ++j) d[i][j] = 0.f;
    for (int k = 0; k < p.k_blocks; ++k) {
      const uint64_t a_stage = wgmma_further(a, at.stage * sizeof(shared.a[0]));
      const uint64_t b_stage = wgmma_further(b, at.stage * sizeof(shared.b[0]));
      shared.pipeline.wait(at);
#pragma unroll
      for (int i = 0; i < kMBlocks; ++i) {
        float part[kCount], of_row[2] = {1.f, 1.f};
        if constexpr (kBlockScales) {
          of_row[0] = shared.a_scale[at.stage][own_row + i * 64];
          of_row[1] = shared.a_scale[at.stage][own_row + i * 64 + 8];
        }
        float of_column[kScaleColumns < 8 ? 1 : kOwnColumns / kScaleColumns];
        if constexpr (kScales == GemmScales::kBlocks) {
#pragma unroll
          for (int c = 0; c < kOwnColumns / kScaleColumns; ++c)
            of_column[c] = shared.b_scale[at.stage][column / kScaleColumns + c];
        }
        wgmma_fence();
        multiply_stage(part, wgmma_further(a_stage, i * 64 * kSwizzleLineBytes), b_stage, false);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(part);
        if constexpr (kScales == GemmScales::kRows) {
          if (i == kMBlocks - 1) release(at.stage);
#pragma unroll
          for (int j = 0; j < kCount; ++j) d[i][j] += part[j];
        } else if constexpr (kScales == GemmScales::kBlocks) {
          if (i == kMBlocks - 1) release(at.stage);
#pragma unroll
          for (int j = 0; j < kCount; ++j) d[i][j] += part[j] * (of_row[j / 2 % 2] * of_column[j * 2 / kScaleColumns]);
        } else {
#pragma unroll
          for (int j = 0; j < kCount; j += 4) {
            const float2 c =
                *reinterpret_cast<const float2*>(&shared.b_scale[at.stage][column + j * 2 + threadIdx.x % 4 * 2]);
            d[i][j] += part[j] * (of_row[0] * c.x), d[i][j + 1] += part[j + 1] * (of_row[0] * c.y);
            d[i][j + 2] += part[j + 2] * (of_row[1] * c.x), d[i][j + 3] += part[j + 3] * (of_row[1] * c.y);
          }
          if (i == kMBlocks - 1) release(at.stage);
        }
      }
      at.advance(kStages);
    }
  }
};

// kBytes: of shared memory that the launch requests.
template <class A, class B, class Out, bool kMnMajorB, int kRows, int kColumns, int kWarpgroupsM, int kStages,
          int kBuffers, GemmScales kScales, template <int, int> class Tiles, int kBytes>
FI_DEVICE void gemm_sm90(const GemmSm90Params& p) {
  using Kernel = GemmSm90<A, B, Out, kMnMajorB, kRows, kColumns, kWarpgroupsM, kStages, kBuffers, kScales, Tiles>;
  Kernel(p, dynamic_shared<typename Kernel::Shared, 1024, kBytes>()).run();
}

}  // namespace fi
