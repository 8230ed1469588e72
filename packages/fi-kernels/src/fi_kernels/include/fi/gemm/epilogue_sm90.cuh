// The epilogue of the Hopper GEMM: scales and bias in registers, then blocks of 16 rows by 128 bytes of a warp through
// shared memory to stores of whole lines.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"
#include "fi/gemm/tile_sm90.cuh"

namespace fi {

// What an epilogue multiplies sums by, and adds. kBias: 16-bit operands rarely have either; kAlways: fp8 operands have
// one scale at least, or it is 1.
enum class GemmScaled { kNever, kBias, kAlways };

// out = d * scale of row * scale of column + bias, for kMBlocks times 64 rows and kColumns columns of a warpgroup, or d
// * one scale. It is loaded before the mainloop, which hides the latency, and shared among the warpgroup behind it.
template <class Out, GemmScaled kScaled, int kMBlocks, int kColumns>
struct OutputScales {
  static constexpr int kLoads = (kColumns + 127) / 128;
  // In shared memory, by column.
  struct Shared {
    float scale[kColumns];
    Out bias[kColumns];
  };
  float of_row[kMBlocks][2], of_column[kLoads];

  // Whether rows or columns have scales of their own, or there is a bias; else all have that of the first row.
  FI_DEVICE static bool each(const GemmProblem& p) {
    if (kScaled == GemmScaled::kBias) return p.bias || p.a_scale || p.b_scale;
    return p.bias || p.a_scale_row_stride != 0 || p.b_scale_row_stride != 0;
  }

  FI_DEVICE OutputScales(const GemmProblem& p, const GemmTile& tile, int row, int column) {
    if (kScaled == GemmScaled::kBias && !each(p)) return;
    const int thread = threadIdx.x % 128, last_row = max(tile.rows, 1) - 1;
#pragma unroll
    for (int i = 0; i < 2 * kMBlocks; ++i) {
      const int at = tile.row + min(row + wgmma_row(thread) + i / 2 * 64 + i % 2 * 8, last_row);
      of_row[i / 2][i % 2] =
          p.a_scale ? p.a_scale[tile.a_batch * p.a_scale_batch_stride + at * p.a_scale_row_stride] : 1.f;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = min(column + i * 128 + thread, p.n - 1);
      of_column[i] = p.b_scale ? p.b_scale[tile.b_batch * p.b_scale_batch_stride + at * p.b_scale_row_stride] : 1.f;
    }
  }
  // Before a barrier of the warpgroup; behind another one that follows the last apply.
  FI_DEVICE void share(const GemmProblem& p, int column, Shared& shared) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = i * 128 + threadIdx.x % 128;
      if (at >= kColumns) continue;
      shared.scale[at] = of_column[i];
      shared.bias[at] = p.bias ? static_cast<const Out*>(p.bias)[min(column + at, p.n - 1)] : Out(0.f);
    }
  }
  // d[0] to d[3] are rows 0, 0, 1, 1 and columns 0, 1, 0, 1 of a thread's four, from `column` on.
  FI_DEVICE void apply(float (&d)[4], int m_block, const Shared& shared, int column) const {
    const int at = column + threadIdx.x % 4 * 2;
    const float2 scale = *reinterpret_cast<const float2*>(&shared.scale[at]);
    const float2 add = {to_float(shared.bias[at]), to_float(shared.bias[at + 1])};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      d[2 * h] = d[2 * h] * (of_row[m_block][h] * scale.x) + add.x;
      d[2 * h + 1] = d[2 * h + 1] * (of_row[m_block][h] * scale.y) + add.y;
    }
  }
  // The same unless `each`, to the same bits.
  FI_DEVICE void apply_one(float (&d)[4]) const {
    if constexpr (kScaled == GemmScaled::kAlways) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i] = d[i] * (of_row[0][0] * of_column[0]) + 0.f;
    }
  }
};

// Where the mainloop has applied scales, and there is no bias.
template <class Out, int kMBlocks, int kColumns>
struct OutputScales<Out, GemmScaled::kNever, kMBlocks, kColumns> {
  struct Shared {};
  FI_DEVICE OutputScales(const GemmProblem&, const GemmTile&, int, int) {}
  FI_DEVICE void apply_one(float (&)[4]) const {}
};

struct NoScales {
  FI_DEVICE void operator()(float (&)[4], int) const {}
};

// Stages the accumulators of 64 rows and up to 128 bytes of columns, from accumulator `begin` on, which is known at
// compile time where this is inlined. apply: scales four accumulators, from a column on.
template <class Out, int kCount, class Apply>
FI_DEVICE void stage_block(char* block, const float (&d)[kCount], int begin, const Apply& apply) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp_row = thread / 32 * 16;
  // Lanes 8 m .. 8 m + 7 give the rows of matrix m of stmatrix: rows 0 to 7 and 8 to 15 of 8 columns, then of the next.
  const int line = warp_row + lane / 8 % 2 * 8 + lane % 8, chunk = lane / 16;
#pragma unroll
  for (int i = 0; i < 64 / static_cast<int>(sizeof(Out)); i += 8) {
    if (begin + i >= kCount) continue;
    float x[2][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j / 4][j % 4] = d[begin + i + j];
    apply(x[0], (begin + i) * 2);
    apply(x[1], (begin + i) * 2 + 8);
    if constexpr (sizeof(Out) == 2) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack_pair(x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1], Out());
      stmatrix_x4(block + swizzled_offset(line, i / 4 + chunk), words);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<float2*>(block +
                                   swizzled_offset(warp_row + lane / 4 + j % 2 * 8, i / 2 + j / 2 * 2 + lane % 4 / 2) +
                                   lane % 2 * 8) = {x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1]};
    }
  }
}

// Stores the 16 rows of a staged block that this warp has staged: `rows` and `columns` of the block exist.
template <class Out>
FI_DEVICE void store_rows(const char* block, Out* out, int64_t row_stride, int rows, int columns, bool whole_rows) {
  constexpr int kChunk = 16 / sizeof(Out);
  const int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
  const int column = chunk * kChunk;
  Out* to = out + first * row_stride + column;
  if (whole_rows && column + kChunk <= columns) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = *reinterpret_cast<const uint4*>(block + swizzled_offset(first + i * 4, chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i * 4 < rows) store_global(to + i * 4 * row_stride, x[i]);
  } else {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {  // not unrolled: short kernels fetch their code from DRAM
      const Out* values = reinterpret_cast<const Out*>(block + swizzled_offset(first + i * 4, chunk));
#pragma unroll
      for (int e = 0; e < kChunk; ++e)
        if (first + i * 4 < rows && column + e < columns) to[i * 4 * row_stride + e] = values[e];
    }
  }
}

// An epilogue is that of a consumer warpgroup: `begin` comes before the mainloop of a tile and returns what it loads,
// `store` behind it. It may hold the last kHeldStages stages of a tile that is stored by_tma: a warp of its own stores
// from them (store_tiles) and releases them. Two are constants of the code: k is whole passes through the ring, and
// before_last gets the first accumulators while the last products run. kTransposes: it may store transposed tiles,
// whose k a cluster may split.
//
// StoreRows: each warp stages 16 rows of a block of 64 rows by 128 bytes at a time and stores them. kStagedBytes: of a
// warpgroup, in shared memory.
template <class Tile, class Out, GemmScaled kScaled, int kStagedBytes = 64 * kSwizzleLineBytes>
struct StoreRows {
  using Params = GemmSm90Params;
  using Scales = OutputScales<Out, kScaled, Tile::kOwnRows / 64, Tile::kOwnColumns>;
  static constexpr int kHeldStages = 0, kBlockBytes = 64 * kSwizzleLineBytes;
  static constexpr bool kTransposes = false;
  struct Staged {
    alignas(1024) char of[Tile::kConsumers][kStagedBytes];
  };
  struct Shared {
    alignas(16) typename Scales::Shared scales[Tile::kConsumers];
    FI_DEVICE void init() {}
  };

  const GemmSm90Params& p;
  const int warpgroup;
  char* const out;  // of the warpgroup, in shared memory
  typename Scales::Shared& of_columns;

  template <class All>
  FI_DEVICE StoreRows(const GemmSm90Params& params, All& all, int of_warpgroup)
      : p(params),
        warpgroup(of_warpgroup),
        out(all.staged.of[of_warpgroup]),
        of_columns(all.epilogue.scales[of_warpgroup]) {}

  FI_DEVICE Scales begin(const GemmTile& tile) const {
    return {p.problem, tile, Tile::row(warpgroup), tile.column + Tile::column(warpgroup)};
  }
  FI_DEVICE bool by_tma() const { return false; }
  FI_DEVICE void finish() const {}
  template <int kCount>
  FI_DEVICE void before_last(const float (&)[kCount]) const {}
  // last: the last stage of the tile.
  template <int kMBlocks, int kCount>
  FI_DEVICE void store(const float (&d)[kMBlocks][kCount], const Scales& scales, const GemmTile& tile, int last) const {
    store_tile(d, scales, tile, *this);
  }
  // Memory for block i of the tile, and what follows 64 rows that are staged for another warp.
  FI_DEVICE char* block(int i) const { return out; }
  FI_DEVICE void commit(int m_block) const {}

 protected:
  // With scales of rows and columns only where there are any: without them, the code is short. staging: has by_tma,
  // block, commit.
  template <int kMBlocks, int kCount, class Staging>
  FI_DEVICE void store_tile(const float (&d)[kMBlocks][kCount], const Scales& scales, const GemmTile& tile,
                            const Staging& staging) const {
    if constexpr (kScaled != GemmScaled::kNever) {
      if (Scales::each(p.problem)) return store_blocks<true>(d, scales, tile, staging);
    }
    store_blocks<false>(d, scales, tile, staging);
  }

 private:
  template <bool kEach, int kMBlocks, int kCount, class Staging>
  FI_DEVICE void store_blocks(const float (&d)[kMBlocks][kCount], const Scales& scales, const GemmTile& tile,
                              const Staging& staging) const {
    constexpr int kWidth = kSwizzleLineBytes / sizeof(Out), kBlocks = (2 * kCount + kWidth - 1) / kWidth;
    const GemmProblem& q = p.problem;
    const int row = Tile::row(warpgroup), column = tile.column + Tile::column(warpgroup);
    if constexpr (kEach) {
      warpgroup_sync(1 + warpgroup);  // all have read those of the tile before
      scales.share(q, column, of_columns);
      warpgroup_sync(1 + warpgroup);
    } else if (staging.by_tma()) {
      warpgroup_sync(1 + warpgroup);  // all warps have multiplied what blocks overwrite
    }
    Out* to =
        static_cast<Out*>(q.out) + tile.a_batch * q.out_batch_stride + (tile.row + row) * q.out_row_stride + column;
#pragma unroll
    for (int i = 0; i < kMBlocks * kBlocks; ++i) {
      const int at_row = i / kBlocks * 64, at_column = i % kBlocks * kWidth;
      __syncwarp();
      char* block = staging.block(i);
      stage_block<Out>(block, d[i / kBlocks], i % kBlocks * (kWidth / 2), [&](float (&x)[4], int at) {
        if constexpr (kEach)
          scales.apply(x, i / kBlocks, of_columns, at);
        else
          scales.apply_one(x);
      });
      if (staging.by_tma()) {
        if (i % kBlocks == kBlocks - 1) staging.commit(i / kBlocks);
        continue;
      }
      __syncwarp();
      store_rows(block, to + at_row * q.out_row_stride + at_column, q.out_row_stride, tile.rows - row - at_row,
                 min(min(kWidth, 2 * kCount - at_column), q.n - column - at_column), p.whole_rows);
    }
  }
};

}  // namespace fi
