// GEMM on Hopper: persistent warp-specialised CTAs. A TMA warp fills a ring of operand tiles, a second warp brings the
// scales of blocks, and two consumer warpgroups multiply (wgmma) and store.
#pragma once
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/gemm/gemm_epilogue_sm90.cuh"

namespace fi {

enum class GemmScales { kNone, kRows, kBlocks, kColumnBlocks };

FI_HOST_DEVICE constexpr int gemm_common_divisor(int a, int b) { return b == 0 ? a : gemm_common_divisor(b, a % b); }

struct NoGate {};

// kMnMajorB: b is MN-major, which 16-bit operands may be. kRows x kColumns: of a tile. kWarpgroupsM: consumer
// warpgroups along m; the others are along n. kStages: of operands. kScales:
// kNone for 16-bit operands (alpha and scales of rows are multiplied in the epilogue), kRows for fp8, kBlocks for
// scales of 128 k and 1 or 128 rows of a and 128 rows of b, kColumnBlocks if each row of b has its own.
//
// Gated: what stores a tile whose columns are, for each warpgroup along n, kHalf rows of b and those n / 2 further: a
// thread has both in its accumulators, of 16-bit operands one after the other. NoGate: the tile is stored as it is.
// kEarlyStores: of tiles with block scales, below.
//
// The tensor cores add fp8 products with about 14 bits, so the products of each block of 128 k have accumulators of
// their own (`part`), which are added to those of the tile in fp32. While one warpgroup adds, the other multiplies.
template <class A, class B, class Out, bool kMnMajorB, int kRows, int kColumns, int kWarpgroupsM, int kStages,
          GemmScales kScales, template <int, int> class Tiles, class Gated = NoGate, bool kEarlyStores = false>
struct GemmSm90 {
  static constexpr int kConsumers = 2, kBlockK = kSwizzleLineBytes / sizeof(A);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(registers_fit(kProducerRegisters + kConsumers * kConsumerRegisters, 1 + kConsumers), "registers");
  static constexpr bool kFp8 = sizeof(A) == 1, kBlockScales = kScales >= GemmScales::kBlocks;
  // Of a warpgroup.
  static constexpr int kOwnRows = kRows / kWarpgroupsM, kOwnColumns = kColumns * kWarpgroupsM / kConsumers;
  static constexpr bool kGated = !kIsSame<Gated, NoGate>;
  static constexpr int kHalf = kOwnColumns / 2;  // columns of a projection
  static_assert(!kGated || (kOwnRows == 64 && !kMnMajorB), "64 rows of a warpgroup");
  static_assert(!kGated || !kFp8 || (kScales == GemmScales::kBlocks && kHalf == 128), "128 features share a scale");
  // Blocks of accumulators: 64 rows each, or the two projections of a gated tile of fp8.
  static constexpr bool kGatedBlocks = kGated && kFp8;
  static constexpr int kMBlocks = kGatedBlocks ? 2 : kOwnRows / 64, kCount = kGatedBlocks ? 64 : kOwnColumns / 2;
  static constexpr int kTileBytes = (kRows + kColumns) * kSwizzleLineBytes;
  // An MN-major tile of b is [kColumns / 64][64 k][64 columns].
  static constexpr int kColumnBlockBytes = kBlockK * kSwizzleLineBytes;
  static_assert(!kMnMajorB || (!kFp8 && kOwnColumns % kBlockK == 0), "whole blocks of 64 columns");
  // Columns of a tile that have the same scale, wherever the tile begins.
  static constexpr int kScaleColumns = kScales == GemmScales::kColumnBlocks ? 1 : gemm_common_divisor(kOwnColumns, 128);
  static constexpr int kColumnScales = kBlockScales ? kColumns / kScaleColumns : 1;
  // Block scales have a ring of their own, whose stages have those of kScaleBlocks blocks of k: 16 bytes of a row-major
  // a_scale are one copy.
  static constexpr int kScaleStages = 3, kScaleBlocks = 4;
  // Four blocks of k are one pass through the ring, whose stages are then constants of the code.
  static constexpr bool kUnrolled = kBlockScales && kStages == kScaleBlocks;

  // A warpgroup stages its tile as blocks of 64 rows by 128 bytes. A warp stores them by TMA while the next tile is
  // multiplied, where half of them fit the warpgroup's own rows of the operand of the last stage of the tile, which is
  // released when they have been stored; the others have memory of their own. H200, 4096 x 24576 x 1536 with one scale:
  // two such stages and one block of memory take 255.5 us, this 251.3, stores by the consumers 258.8. Tiles of 128 rows
  // are slower with it: 4096 x 2112 x 7168 112.2 to 116.2.
  //
  // Block scales leave no such memory. With early stores, the first 64 rows of every tile are staged in the stage
  // before its last one while the last products of the other 64 run, and these in its last one. k is whole passes
  // through the ring, so both stages are constants of the code; there is no bias and no other epilogue.
  static constexpr int kBlockBytes = 64 * kSwizzleLineBytes;
  static constexpr int kColumnBlocks = kOwnColumns / 64, kBlocks = kMBlocks * kColumnBlocks;
  static constexpr int kStageBlocks = kWarpgroupsM == kConsumers ? kOwnRows / 64 : kColumnBlocks;
  static constexpr bool kTmaTiles = sizeof(Out) == 2 && kRows == 256 && kBlocks == 2 * kStageBlocks;
  static constexpr bool kLateStores = kTmaTiles && kScales == GemmScales::kRows;
  static_assert(!kEarlyStores || (kTmaTiles && kScales == GemmScales::kBlocks && kUnrolled), "early stores");
  static constexpr bool kTmaStores = kLateStores || kEarlyStores;
  static constexpr int kOutBlocks = kLateStores ? kBlocks - kStageBlocks : 1;

  using Scales = OutputScales<Out, !kBlockScales, kMBlocks, kOwnColumns>;

  struct Shared {
    alignas(1024) char a[kStages][kRows * kSwizzleLineBytes];
    alignas(1024) char b[kStages][kColumns * kSwizzleLineBytes];
    alignas(1024) char out[kConsumers][kOutBlocks * kBlockBytes];
    alignas(16) float a_scale[kBlockScales ? kScaleStages : 1][kBlockScales ? kScaleBlocks * kRows : 1];
    alignas(16) float b_scale[kBlockScales ? kScaleStages : 1][kScaleBlocks][kColumnScales];
    alignas(16) typename Scales::Shared scales[kConsumers];
    GemmTile tiles[kStages];  // of a stage that is the first of a tile
    Pipeline<kStages> pipeline;
    Pipeline<kBlockScales ? kScaleStages : 1> scale_pipeline;
    Barrier staged[kConsumers][kMBlocks];  // blocks of 64 rows of the warpgroup are staged
    Barrier stored[kConsumers];            // and its memory `out` has been read
  };

  static constexpr int kNoTile = -0x7fffffff;  // rows of the tile that ends the work

  const GemmSm90Params& p;
  Shared& shared;
  const Gated gated;

  FI_DEVICE GemmSm90(const GemmSm90Params& params, Shared& s, const Gated& g = {}) : p(params), shared(s), gated(g) {}

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) {
      prefetch_tensor_map(p.a);
      prefetch_tensor_map(p.b);
      if (kTmaStores && p.tma_stores) prefetch_tensor_map(p.out);
      shared.pipeline.init(1, kConsumers * 4);
      if (kBlockScales) shared.scale_pipeline.init(32, kConsumers * 4);
      for (int w = 0; kTmaStores && w < kConsumers; ++w) {
        for (int i = 0; i < kMBlocks; ++i) shared.staged[w][i].init(4);
        shared.stored[w].init(1);
      }
      fence_barrier_init();
    }
    __syncthreads();
    pdl_wait();
    const int warpgroup = warpgroup_index();
    if (warpgroup == kConsumers) {
      give_registers<kProducerRegisters>();
      const int warp = warp_index() % 4;
      if (warp == 0)
        load_operands();
      else if (warp == 1 && kBlockScales)
        load_scales();
      else if (warp >= 2 && kTmaStores && p.tma_stores)
        store_tiles(warp - 2);
    } else {
      take_registers<kConsumerRegisters>();
      consume(warpgroup);
    }
  }

 private:
  // By a warp; lane 0 copies.
  FI_DEVICE void load_operands() const {
    Tiles<kRows, kColumns> tiles(p);
    GemmTile tile;
    const uint64_t b_policy = p.b_once ? kEvictFirst : kEvictNormal;
    PipelineState at = PipelineState::producer();
    while (tiles.next(tile)) {
      if (threadIdx.x % 32 == 0) {
        shared.pipeline.acquire(at);
        shared.tiles[at.stage] = tile;
        for (int k = 0; k < p.k_blocks; ++k) {
          shared.pipeline.acquire(at);
          Barrier& full = shared.pipeline.expect(at.stage, kTileBytes);
          tma_load_hinted(shared.a[at.stage], p.a, full, kEvictNormal, k * kBlockK, tile.row, tile.a_batch);
          if constexpr (kMnMajorB) {
            for (int c = 0; c < kColumns / kBlockK; ++c)
              tma_load_hinted(shared.b[at.stage] + c * kColumnBlockBytes, p.b, full, b_policy,
                              tile.column + c * kBlockK, k * kBlockK, tile.b_batch);
          } else if constexpr (kGated) {
            for (int i = 0; i < kColumns / kHalf; ++i)
              tma_load_hinted(shared.b[at.stage] + i * kHalf * kSwizzleLineBytes, p.b, full, b_policy, k * kBlockK,
                              row_of_b(tile, i), tile.b_batch);
          } else {
            tma_load_hinted(shared.b[at.stage], p.b, full, b_policy, k * kBlockK, tile.column, tile.b_batch);
          }
          at.advance(kStages);
        }
        for (; kUnrolled && at.stage != 0; at.advance(kStages)) {  // empty stages
          shared.pipeline.acquire(at);
          shared.pipeline.commit(at.stage);
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

  // The first row of b of kHalf columns of a gated tile: both projections of a warpgroup, then of the next.
  FI_DEVICE int row_of_b(const GemmTile& tile, int i) const {
    return tile.column / 2 + i / 2 * kHalf + i % 2 * (p.problem.n / 2);
  }

  // Whether kScaleBlocks k of a row of a_scale are 16 aligned bytes: one copy, where 4 bytes each would touch as many
  // lines of L1 as there are rows for every k. They lie in shared memory as [row][k] then, else as [k][row].
  FI_DEVICE bool a_scale_by_rows() const {
    const GemmProblem& q = p.problem;
    return q.a_scale_rows == 1 && q.a_scale_k_stride == 1 &&
           aligned(q.a_scale, q.a_scale_row_stride | q.a_scale_batch_stride);
  }
  FI_DEVICE static bool aligned(const float* x, int64_t strides) {
    return ((reinterpret_cast<uint64_t>(x) | static_cast<uint64_t>(strides) * 4) & 15) == 0;
  }

  // By a warp: the block scales.
  FI_DEVICE void load_scales() const {
    const GemmProblem& q = p.problem;
    const int lane = threadIdx.x % 32;
    const bool by_rows = a_scale_by_rows();
    const bool by_columns = q.a_scale_rows == 1 && q.a_scale_row_stride == 1 &&
                            aligned(q.a_scale, q.a_scale_k_stride | q.a_scale_batch_stride);
    Tiles<kRows, kColumns> tiles(p);
    GemmTile tile;
    PipelineState at = PipelineState::producer();
    while (tiles.next(tile)) {
      const float* a = q.a_scale + tile.a_batch * q.a_scale_batch_stride;
      const float* b = q.b_scale + tile.b_batch * q.b_scale_batch_stride;
      for (int k = 0; k < p.k_blocks; k += kScaleBlocks, at.advance(kScaleStages)) {
        const int blocks = min(kScaleBlocks, p.k_blocks - k);
        float* to = shared.a_scale[at.stage];
        shared.scale_pipeline.acquire(at);
        if (by_rows) {
          const float* from = a + (tile.row + lane) * q.a_scale_row_stride + k;
#pragma unroll 4
          for (int row = lane; row < kRows; row += 32, from += 32 * q.a_scale_row_stride)
            if (row < tile.rows) cp_async_16_part(to + row * kScaleBlocks, from, blocks * 4);
        } else if (by_columns && tile.row % 4 == 0) {
          const float* from = a + k * q.a_scale_k_stride + tile.row;
#pragma unroll 1
          for (int block = 0; block < blocks; ++block, from += q.a_scale_k_stride)
            for (int row = lane * 4; row < kRows; row += 128)
              if (row < tile.rows) cp_async_16_part(to + block * kRows + row, from + row, min(tile.rows - row, 4) * 4);
        } else {
#pragma unroll 1
          for (int row = lane; row < min(kRows, tile.rows); row += 32) {
            const int from_row = q.a_scale_rows == 1 ? tile.row + row : (tile.row + row) / 128;
            const float* from = a + from_row * q.a_scale_row_stride + k * q.a_scale_k_stride;
            for (int block = 0; block < blocks; ++block, from += q.a_scale_k_stride)
              cp_async_4(to + block * kRows + row, from);
          }
        }
#pragma unroll 1
        for (int i = lane; i < kScaleBlocks * kColumnScales; i += 32) {
          const int block = i / kColumnScales, at_column = i % kColumnScales;
          const int column = kGated ? row_of_b(tile, at_column) : tile.column + at_column * kScaleColumns;
          if (block < blocks && column < q.n)
            cp_async_4(&shared.b_scale[at.stage][0][i],
                       b + (kScales == GemmScales::kColumnBlocks ? column : column / 128) * q.b_scale_row_stride +
                           (k + block) * q.b_scale_k_stride);
        }
        shared.scale_pipeline.commit_copies(at.stage);
      }
    }
  }

  // Whether TMA stores a tile. Rows beyond its last may be those of another group.
  FI_DEVICE bool stored_by_tma(const GemmTile& tile) const {
    return kEarlyStores || (kLateStores && p.tma_stores && uniform(tile.rows) >= kRows);
  }

  // Where a warpgroup stages its tile. last: the last stage of the tile.
  struct Staging {
    const GemmSm90& kernel;
    int warpgroup, last;
    bool tma;

    FI_DEVICE bool by_tma() const { return kTmaStores && tma; }
    FI_DEVICE char* block(int i) const {
      if (!by_tma()) return kernel.shared.out[warpgroup];
      if (kLateStores && i >= kStageBlocks) return kernel.shared.out[warpgroup] + (i - kStageBlocks) * kBlockBytes;
      const int stage = kEarlyStores ? kStages - kMBlocks + i / kStageBlocks : last;
      char* operand = kWarpgroupsM == kConsumers ? kernel.shared.a[stage] : kernel.shared.b[stage];
      return operand + (warpgroup * kStageBlocks + i % kStageBlocks) * kBlockBytes;
    }
    // By whole warps, which have staged 64 rows.
    FI_DEVICE void commit(int m_block) const {
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) kernel.shared.staged[warpgroup][m_block].arrive();
    }
  };

  // By a warp: stores the tiles of a warpgroup and releases the stages that it has staged them in.
  FI_DEVICE void store_tiles(int warpgroup) const {
    const int row = warpgroup % kWarpgroupsM * kOwnRows, column = warpgroup / kWarpgroupsM * kOwnColumns;
    Tiles<kRows, kColumns> tiles(p);
    GemmTile tile;
    int last = kStages - 1, phase = 0;
    while (tiles.next(tile)) {
      last = (last + p.k_blocks) % kStages;
      if (!stored_by_tma(tile)) continue;
      if (threadIdx.x % 32 == 0) {
        const Staging staging{*this, warpgroup, last, true};
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          if (i % kColumnBlocks == 0) shared.staged[warpgroup][i / kColumnBlocks].wait(phase);
          tma_store(p.out, staging.block(i), tile.column + column + i % kColumnBlocks * 64,
                    tile.row + row + i / kColumnBlocks * 64, tile.a_batch);
          if (kEarlyStores && i == kStageBlocks - 1) {
            bulk_commit();
            bulk_wait_read<0>();
            shared.pipeline.empty[kStages - kMBlocks].arrive(4);
          }
        }
        bulk_commit();
        bulk_wait_read<0>();
        shared.pipeline.empty[kEarlyStores ? kStages - 1 : last].arrive(4);
        if (kLateStores) shared.stored[warpgroup].arrive();
        phase ^= 1;
      }
      __syncwarp();
    }
  }

  FI_DEVICE void consume(int warpgroup) const {
    PipelineState at, scale_at;
    int stored_phase = 1;
    const bool scales_by_rows = kBlockScales && a_scale_by_rows();
    const int row = warpgroup % kWarpgroupsM * kOwnRows, column = warpgroup / kWarpgroupsM * kOwnColumns;
    const uint64_t a = wgmma_uniform(wgmma_operand(shared.a[0] + row * kSwizzleLineBytes, kSwizzlePeriod));
    const uint64_t b = wgmma_uniform(
        wgmma_operand(shared.b[0] + column * kSwizzleLineBytes, kSwizzlePeriod, kMnMajorB ? kColumnBlockBytes : 16));
    for (;;) {
      shared.pipeline.wait(at);
      const GemmTile tile = shared.tiles[at.stage];
      if (uniform(tile.rows) == kNoTile) break;
      const bool by_tma = stored_by_tma(tile);
      const Scales scales(p.problem, tile, row, tile.column + column);
      float d[kMBlocks][kCount];
      if constexpr (!kFp8)
        multiply(d, a, b, at);
      else if (kBlockScales && scales_by_rows)
        multiply_in_parts<true>(d, a, b, row, column, by_tma, at, scale_at);
      else
        multiply_in_parts<false>(d, a, b, row, column, by_tma, at, scale_at);
      if constexpr (kGated) {
        gated.store(d, shared.out[warpgroup], tile, row, tile.column / 2 + column / 2);
      } else if constexpr (kEarlyStores) {
        stage_early(d[1], 1, warpgroup);
      } else {
        const Staging staging{*this, warpgroup, at.stage == 0 ? kStages - 1 : at.stage - 1, by_tma};
        if (kLateStores) shared.stored[warpgroup].wait(stored_phase);
        gemm_epilogue<Out, !kBlockScales>(p, d, scales, staging, shared.scales[warpgroup], tile, row,
                                          tile.column + column, 1 + warpgroup);
        if (by_tma) stored_phase ^= 1;
      }
    }
  }

  // Stages 64 rows, whose memory is an operand that all warps have read.
  FI_DEVICE void stage_early(const float (&d)[kCount], int m_block, int warpgroup) const {
    const Staging staging{*this, warpgroup, kStages - 1, true};
    warpgroup_sync(1 + warpgroup);
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i)
      stage_block<Out>(staging.block(m_block * kColumnBlocks + i), d, i * 32, NoScales());
    staging.commit(m_block);
  }

  // By a warp, which no longer reads the stage. held: what stores the tile releases it.
  FI_DEVICE void release(int stage, bool held = false) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0 && !held) shared.pipeline.release(stage);
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

  // Adds the products of the block of k in `stage` to d. a_scale, b_scale: its block scales. following: the next stage
  // and its phase; held: the stage is not released, and with early stores, the first 64 rows are staged in the last
  // one; ready: whether this stage, and afterwards the next one, is known to be full.
  template <bool kByRows>
  FI_DEVICE void multiply_block(float (&d)[kMBlocks][kCount], uint64_t a, uint64_t b, const float* a_scale,
                                const float* b_scale, int column, int stage, bool held, const PipelineState& following,
                                bool& ready) const {
    constexpr int kRowStep = kByRows ? kScaleBlocks : 1;
    const uint64_t a_stage = wgmma_further(a, stage * sizeof(shared.a[0]));
    const uint64_t b_stage = wgmma_further(b, stage * sizeof(shared.b[0]));
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
      float part[kCount], of_row[2] = {1.f, 1.f};
      if constexpr (kBlockScales) {
        of_row[0] = a_scale[(kGatedBlocks ? 0 : i * 64) * kRowStep];
        of_row[1] = a_scale[(kGatedBlocks ? 8 : i * 64 + 8) * kRowStep];
      }
      float of_column[kScaleColumns < 8 ? 1 : kOwnColumns / kScaleColumns];
      if constexpr (kGatedBlocks) {
        of_column[0] = b_scale[i];
      } else if constexpr (kScales == GemmScales::kBlocks) {
#pragma unroll
        for (int c = 0; c < kOwnColumns / kScaleColumns; ++c) of_column[c] = b_scale[column / kScaleColumns + c];
      }
      wgmma_fence();
      multiply_stage(part, wgmma_further(a_stage, kGatedBlocks ? 0 : i * 64 * kSwizzleLineBytes),
                     wgmma_further(b_stage, kGatedBlocks ? i * kHalf * kSwizzleLineBytes : 0), false);
      wgmma_commit();
      // Asked while the tensor cores compute: little lies between the additions and the next products then.
      if (i == kMBlocks - 1) ready = shared.pipeline.full[following.stage].try_wait(following.phase);
      if (kEarlyStores && i == kMBlocks - 1 && stage == kStages - 1 && held) stage_early(d[0], 0, warpgroup_index());
      wgmma_wait<0>();
      wgmma_keep(part);
      if (i == kMBlocks - 1) release(stage, held);
      if constexpr (kScales == GemmScales::kRows) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) d[i][j] += part[j];
      } else if constexpr (kScales == GemmScales::kBlocks) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) d[i][j] += part[j] * (of_row[j / 2 % 2] * of_column[j * 2 / kScaleColumns]);
      } else {
#pragma unroll
        for (int j = 0; j < kCount; j += 4) {
          const float2 c = *reinterpret_cast<const float2*>(&b_scale[column + j * 2 + threadIdx.x % 4 * 2]);
          d[i][j] += part[j] * (of_row[0] * c.x), d[i][j + 1] += part[j + 1] * (of_row[0] * c.y);
          d[i][j + 2] += part[j + 2] * (of_row[1] * c.x), d[i][j + 3] += part[j + 3] * (of_row[1] * c.y);
        }
      }
    }
  }

  // scale_at: the next stage of block scales. by_tma: stages in which the tile is staged are held. kByRows:
  // a_scale_by_rows.
  template <bool kByRows>
  FI_DEVICE void multiply_in_parts(float (&d)[kMBlocks][kCount], uint64_t a, uint64_t b, int row, int column,
                                   bool by_tma, PipelineState& at, PipelineState& scale_at) const {
    constexpr int kRowStep = kByRows ? kScaleBlocks : 1, kBlockStep = kByRows ? 1 : kRows;  // of scales of a
    const int own_row = kBlockScales ? (row + wgmma_row(threadIdx.x % 128)) * kRowStep : 0;
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kCount; ++j) d[i][j] = 0.f;
    bool ready = true;                                            // the stage `at` is full, which the caller has seen
    const int blocks = kBlockScales ? kScaleBlocks : p.k_blocks;  // of an iteration
    for (int k = 0; k < p.k_blocks; k += blocks) {
      const float* a_scale = shared.a_scale[scale_at.stage] + own_row;
      const float* b_scale = shared.b_scale[scale_at.stage][0];
      if (kBlockScales) shared.scale_pipeline.wait(scale_at);
      if (kEarlyStores || (kUnrolled && k + kScaleBlocks <= p.k_blocks)) {
#pragma unroll
        for (int stage = 0; stage < kScaleBlocks; ++stage) {
          if (!ready) shared.pipeline.wait({stage, at.phase});
          const PipelineState following{(stage + 1) % kScaleBlocks, stage + 1 < kScaleBlocks ? at.phase : at.phase ^ 1};
          const bool held = kEarlyStores && stage >= kStages - kMBlocks && k + kScaleBlocks == p.k_blocks;
          multiply_block<kByRows>(d, a, b, a_scale + stage * kBlockStep, b_scale + stage * kColumnScales, column, stage,
                                  held, following, ready);
        }
        at.phase ^= 1;
      } else {
#pragma unroll 1
        for (int block = k; block < min(k + blocks, p.k_blocks); ++block) {
          if (!ready) shared.pipeline.wait(at);
          PipelineState following = at;
          following.advance(kStages);
          const bool held = kTmaStores && by_tma && block == p.k_blocks - 1;
          multiply_block<kByRows>(d, a, b, a_scale, b_scale, column, at.stage, held, following, ready);
          at = following;
          a_scale += kBlockStep;
          b_scale += kColumnScales;
        }
        // The next tile begins at stage 0.
        for (; kUnrolled && at.stage != 0; at.advance(kStages)) {
          shared.pipeline.wait(at);
          release(at.stage);
        }
      }
      if (kBlockScales) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) shared.scale_pipeline.release(scale_at.stage);
        scale_at.advance(kScaleStages);
      }
    }
  }
};

// kBytes: of shared memory that the launch asks for.
template <class A, class B, class Out, bool kMnMajorB, int kRows, int kColumns, int kWarpgroupsM, int kStages,
          GemmScales kScales, template <int, int> class Tiles, int kBytes, bool kEarlyStores = false>
FI_DEVICE void gemm_sm90(const GemmSm90Params& p) {
  using Kernel =
      GemmSm90<A, B, Out, kMnMajorB, kRows, kColumns, kWarpgroupsM, kStages, kScales, Tiles, NoGate, kEarlyStores>;
  Kernel(p, dynamic_shared<typename Kernel::Shared, 1024, kBytes>()).run();
}

}  // namespace fi
