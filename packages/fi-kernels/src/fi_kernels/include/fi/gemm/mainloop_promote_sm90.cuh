// The mainloop of the Hopper GEMM for fp8: the products of each 128 k are added in fp32, with the scales of their
// block, which a warp of their own brings.
#pragma once
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"
#include "fi/gemm/mainloop_sm90.cuh"

namespace fi {

// kRows: of rows and columns, which the epilogue multiplies; kBlocks: of 128 k and 1 or 128 rows of a and 128 rows of
// b; kRowBlocks: so, and those of 4 k of a row of a are 16 aligned bytes; kColumnBlocks: each row of b has its own.
enum class GemmScales { kRows, kBlocks, kRowBlocks, kColumnBlocks };

FI_HOST_DEVICE constexpr int gemm_common_divisor(int a, int b) { return b == 0 ? a : gemm_common_divisor(b, a % b); }

// Block scales in shared memory. They have a ring of their own, whose stages have those of kScaleBlocks blocks of k: 16
// bytes of a row-major a_scale are one copy.
template <class Tile, GemmScales kScales>
struct BlockScales {
  static constexpr bool kAny = kScales != GemmScales::kRows;
  static constexpr int kScaleStages = kAny ? 3 : 1, kScaleBlocks = 4, kRows = Tile::kRows;
  // Columns of a tile that have the same scale, wherever the tile begins.
  static constexpr int kScaleColumns =
      kScales == GemmScales::kColumnBlocks ? 1 : gemm_common_divisor(Tile::kOwnColumns, 128);
  static constexpr int kColumnScales = kAny ? Tile::kColumns / kScaleColumns : 1;

  alignas(16) float a[kScaleStages][kAny ? kScaleBlocks * kRows : 1];
  alignas(16) float b[kScaleStages][kScaleBlocks][kColumnScales];
  Pipeline<kScaleStages, Writer::kThreads, Reader::kLoads> pipeline;

  FI_DEVICE void init() {
    if (kAny) pipeline.init(32, Tile::kConsumers * 4);
  }

  // Whether kScaleBlocks k of a row of a_scale are 16 aligned bytes: one copy, where 4 bytes each would touch as many
  // lines of L1 as there are rows for every k. They lie in shared memory as [row][k] then, else as [k][row].
  FI_DEVICE static bool by_rows(const GemmProblem& q) {
    if constexpr (kScales != GemmScales::kColumnBlocks) return kScales == GemmScales::kRowBlocks;
    return q.a_scale_rows == 1 && q.a_scale_k_stride == 1 &&
           aligned(q.a_scale, q.a_scale_row_stride | q.a_scale_batch_stride);
  }

  // By a warp.
  template <class Tiles>
  FI_DEVICE void load(const GemmSm90Params& p) {
    const GemmProblem& q = p.problem;
    const int lane = threadIdx.x % 32;
    const bool rows = by_rows(q);
    const bool columns = q.a_scale_rows == 1 && q.a_scale_row_stride == 1 &&
                         aligned(q.a_scale, q.a_scale_k_stride | q.a_scale_batch_stride);
    Tiles tiles(p);
    GemmTile tile;
    PipelineState at = PipelineState::producer();
    while (tiles.next(tile)) {
      const float* a_scale = q.a_scale + tile.a_batch * q.a_scale_batch_stride;
      const float* b_scale = q.b_scale + tile.b_batch * q.b_scale_batch_stride;
      for (int k = 0; k < p.k_blocks; k += kScaleBlocks, at.advance(kScaleStages)) {
        const int blocks = min(kScaleBlocks, p.k_blocks - k);
        float* to = a[at.stage];
        pipeline.acquire(at);
        if (rows) {
          const float* from = a_scale + (tile.row + lane) * q.a_scale_row_stride + k;
#pragma unroll 4
          for (int row = lane; row < kRows; row += 32, from += 32 * q.a_scale_row_stride)
            if (row < tile.rows) cp_async_16_part(to + row * kScaleBlocks, from, blocks * 4);
        } else if (columns && tile.row % 4 == 0) {
          const float* from = a_scale + k * q.a_scale_k_stride + tile.row;
#pragma unroll 1
          for (int block = 0; block < blocks; ++block, from += q.a_scale_k_stride)
            for (int row = lane * 4; row < kRows; row += 128)
              if (row < tile.rows) cp_async_16_part(to + block * kRows + row, from + row, min(tile.rows - row, 4) * 4);
        } else {
#pragma unroll 1
          for (int row = lane; row < min(kRows, tile.rows); row += 32) {
            const int from_row = q.a_scale_rows == 1 ? tile.row + row : (tile.row + row) / 128;
            const float* from = a_scale + from_row * q.a_scale_row_stride + k * q.a_scale_k_stride;
            for (int block = 0; block < blocks; ++block, from += q.a_scale_k_stride)
              cp_async_4(to + block * kRows + row, from);
          }
        }
#pragma unroll 1
        for (int i = lane; i < kScaleBlocks * kColumnScales; i += 32) {
          const int block = i / kColumnScales, at_column = i % kColumnScales;
          const int column =
              Tile::kGated ? Tile::row_of_b(tile, at_column, q.n) : tile.column + at_column * kScaleColumns;
          if (block < blocks && column < q.n)
            cp_async_4(&b[at.stage][0][i],
                       b_scale + (kScales == GemmScales::kColumnBlocks ? column : column / 128) * q.b_scale_row_stride +
                           (k + block) * q.b_scale_k_stride);
        }
        pipeline.commit_copies(at.stage);
      }
    }
  }

 private:
  FI_DEVICE static bool aligned(const float* x, int64_t strides) {
    return ((reinterpret_cast<uint64_t>(x) | static_cast<uint64_t>(strides) * 4) & 15) == 0;
  }
};

// The tensor cores add fp8 products with about 14 bits, so the products of each block of 128 k have accumulators of
// their own (`part`), which are added to those of the tile in fp32. While one warpgroup adds, the other multiplies.
// kWholePasses: four blocks of k are one pass through the ring, so each tile begins at stage 0 and stages are constants
// of the code.
template <class Tile, class OperandA, class B, GemmScales kScales>
struct Promote {
  using A = OperandA;
  using Shared = BlockScales<Tile, kScales>;
  static constexpr bool kMnMajorB = false, kBlockScales = Shared::kAny;
  static constexpr int kScaleBlocks = Shared::kScaleBlocks, kScaleColumns = Shared::kScaleColumns;
  static constexpr int kStages = Tile::kStages, kOwnColumns = Tile::kOwnColumns;
  static constexpr bool kWholePasses = kBlockScales && kStages == kScaleBlocks;
  // Blocks of accumulators: 64 rows each, or the two projections of a gated tile.
  static constexpr int kMBlocks = Tile::kGated ? 2 : Tile::kOwnRows / 64, kCount = kOwnColumns / (Tile::kGated ? 4 : 2);
  static constexpr bool kSharedColumns = kScales == GemmScales::kBlocks || kScales == GemmScales::kRowBlocks;
  static_assert(!Tile::kGated || (kSharedColumns && Tile::kHalf == 128), "128 features share a scale");

  const GemmSm90Params& p;
  typename Tile::Ring& ring;
  Shared& shared;
  const int warpgroup;
  const bool by_rows;
  const StageOperands<Tile, A, B> operands;
  PipelineState scale_at{};  // the next stage of block scales

  template <class All>
  FI_DEVICE Promote(const GemmSm90Params& params, All& all, int of_warpgroup)
      : p(params),
        ring(all.ring),
        shared(all.mainloop),
        warpgroup(of_warpgroup),
        by_rows(kBlockScales && Shared::by_rows(p.problem)),
        operands(all.operands, warpgroup) {}

  template <class Epilogue>
  FI_DEVICE void multiply(float (&d)[kMBlocks][kCount], const Epilogue& epilogue, PipelineState& at, int k_blocks) {
    if constexpr (kScales == GemmScales::kRowBlocks)
      multiply_blocks<true>(d, epilogue, at, k_blocks);
    else if (kScales == GemmScales::kColumnBlocks && by_rows)
      multiply_blocks<true>(d, epilogue, at, k_blocks);
    else
      multiply_blocks<false>(d, epilogue, at, k_blocks);
  }

 private:
  // kByRows: BlockScales::by_rows.
  template <bool kByRows, class Epilogue>
  FI_DEVICE void multiply_blocks(float (&d)[kMBlocks][kCount], const Epilogue& epilogue, PipelineState& at,
                                 int k_blocks) {
    // Steps of scales of a.
    constexpr int kRowStep = kByRows ? kScaleBlocks : 1, kBlockStep = kByRows ? 1 : Tile::kRows;
    const int first_scale = kBlockScales ? (Tile::row(warpgroup) + wgmma_row(threadIdx.x % 128)) * kRowStep : 0;
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kCount; ++j) d[i][j] = 0.f;
    bool ready = true;                                          // the stage `at` is full, which the caller has seen
    const int blocks = kBlockScales ? kScaleBlocks : k_blocks;  // of an iteration
    for (int k = 0; k < k_blocks; k += blocks) {
      const float* a_scale = shared.a[scale_at.stage] + first_scale;
      const float* b_scale = shared.b[scale_at.stage][0];
      if (kBlockScales) shared.pipeline.wait(scale_at);
      if (Epilogue::kHeldStages > 1 || (kWholePasses && k + kScaleBlocks <= k_blocks)) {
#pragma unroll
        for (int stage = 0; stage < kScaleBlocks; ++stage) {
          if (!ready) ring.pipeline.wait({stage, at.phase});
          const PipelineState following{(stage + 1) % kScaleBlocks, stage + 1 < kScaleBlocks ? at.phase : at.phase ^ 1};
          const bool held = stage >= kStages - Epilogue::kHeldStages && k + kScaleBlocks == k_blocks;
          multiply_block<kByRows>(d, epilogue, a_scale + stage * kBlockStep, b_scale + stage * Shared::kColumnScales,
                                  stage, held, following, ready);
        }
        at.phase ^= 1;
      } else {
#pragma unroll 1
        for (int block = k; block < min(k + blocks, k_blocks); ++block) {
          if (!ready) ring.pipeline.wait(at);
          PipelineState following = at;
          following.advance(kStages);
          const bool held = Epilogue::kHeldStages > 0 && epilogue.by_tma() && block == k_blocks - 1;
          multiply_block<kByRows>(d, epilogue, a_scale, b_scale, at.stage, held, following, ready);
          at = following;
          a_scale += kBlockStep;
          b_scale += Shared::kColumnScales;
        }
        // The next tile begins at stage 0.
        for (; kWholePasses && at.stage != 0; at.advance(kStages)) {
          ring.pipeline.wait(at);
          ring.release(at.stage);
        }
      }
      if (kBlockScales) {
        shared.pipeline.release_warp(scale_at.stage);
        scale_at.advance(Shared::kScaleStages);
      }
    }
  }

  // Adds the products of the block of k in `stage` to d. a_scale, b_scale: its block scales. following: the next stage
  // and its phase; held: the epilogue releases the stage; ready: whether this stage, and afterwards the next one, is
  // known to be full.
  template <bool kByRows, class Epilogue>
  FI_DEVICE void multiply_block(float (&d)[kMBlocks][kCount], const Epilogue& epilogue, const float* a_scale,
                                const float* b_scale, int stage, bool held, const PipelineState& following,
                                bool& ready) const {
    constexpr int kRowStep = kByRows ? kScaleBlocks : 1;
    const int column = Tile::column(warpgroup);
    const uint64_t a_stage = operands.a_of(stage), b_stage = operands.b_of(stage);
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
      float part[kCount], of_row[2] = {1.f, 1.f};
      if constexpr (kBlockScales) {
        of_row[0] = a_scale[(Tile::kGated ? 0 : i * 64) * kRowStep];
        of_row[1] = a_scale[(Tile::kGated ? 8 : i * 64 + 8) * kRowStep];
      }
      float of_column[kScaleColumns < 8 ? 1 : kOwnColumns / kScaleColumns];
      if constexpr (Tile::kGated) {
        of_column[0] = b_scale[i];
      } else if constexpr (kSharedColumns) {
#pragma unroll
        for (int c = 0; c < kOwnColumns / kScaleColumns; ++c) of_column[c] = b_scale[column / kScaleColumns + c];
      }
      wgmma_fence();
      operands.multiply(part, wgmma_further(a_stage, Tile::kGated ? 0 : i * 64 * kSwizzleLineBytes),
                        wgmma_further(b_stage, Tile::kGated ? i * Tile::kHalf * kSwizzleLineBytes : 0), false);
      wgmma_commit();
      // Asked while the tensor cores compute: little lies between the additions and the next products then.
      if (i == kMBlocks - 1) ready = ring.pipeline.full[following.stage].try_wait(following.phase);
      if (i == kMBlocks - 1 && stage == kStages - 1 && held) epilogue.before_last(d[0]);
      wgmma_wait<0>();
      wgmma_keep(part);
      if (i == kMBlocks - 1) ring.release(stage, held);
      if constexpr (kScales == GemmScales::kRows) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) d[i][j] += part[j];
      } else if constexpr (kSharedColumns) {
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
};

}  // namespace fi
