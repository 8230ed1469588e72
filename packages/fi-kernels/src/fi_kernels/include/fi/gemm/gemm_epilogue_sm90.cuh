// The epilogue of the Hopper GEMM: scales and bias in registers, then blocks of 16 rows by 128 bytes of a warp through
// shared memory to stores of whole lines.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"
#include "fi/gemm/work_tiles.cuh"

namespace fi {

// out = d * scale of row * scale of column + bias, for kMBlocks times 64 rows and kColumns columns of a warpgroup. It
// is loaded before the mainloop, which hides the latency, and shared among the warpgroup behind it.
template <class Out, bool kScales, int kMBlocks, int kColumns>
struct OutputScales {
  static constexpr int kLoads = (kColumns + 127) / 128;
  // In shared memory, by column.
  struct Shared {
    float scale[kColumns];
    Out bias[kColumns];
  };
  float of_row[kMBlocks][2], of_column[kLoads];
  bool any;

  FI_DEVICE OutputScales(const GemmProblem& p, const GemmTile& tile, int row, int column)
      : any(p.a_scale || p.b_scale || p.bias) {
    if (!any) return;
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
};

// Where the mainloop has applied scales, and there is no bias.
template <class Out, int kMBlocks, int kColumns>
struct OutputScales<Out, false, kMBlocks, kColumns> {
  struct Shared {};
  FI_DEVICE OutputScales(const GemmProblem&, const GemmTile&, int, int) {}
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

// What a warpgroup has of a tile: kMBlocks times 64 rows from `row` on, and columns from `column` on. staging: shared
// memory for blocks of 64 rows by 128 bytes, 16 rows of each warp. Either each block has memory of its own, from which
// another warp stores it, or warps stage and store their rows of a block at a time by themselves.
template <class Out, bool kScaled, int kMBlocks, int kCount, class Scales, class Staging>
FI_DEVICE void store_tile(const GemmSm90Params& p, const float (&d)[kMBlocks][kCount], const Scales& scales,
                          const Staging& staging, typename Scales::Shared& shared, const GemmTile& tile, int row,
                          int column, int barrier) {
  constexpr int kWidth = kSwizzleLineBytes / sizeof(Out), kBlocks = (2 * kCount + kWidth - 1) / kWidth;
  const GemmProblem& q = p.problem;
  if constexpr (kScaled) {
    warpgroup_sync(barrier);  // all have read those of the tile before
    scales.share(q, column, shared);
    warpgroup_sync(barrier);
  } else if (staging.by_tma()) {
    warpgroup_sync(barrier);  // all warps have multiplied what blocks overwrite
  }
  Out* out =
      static_cast<Out*>(q.out) + tile.a_batch * q.out_batch_stride + (tile.row + row) * q.out_row_stride + column;
#pragma unroll
  for (int i = 0; i < kMBlocks * kBlocks; ++i) {
    const int at_row = i / kBlocks * 64, at_column = i % kBlocks * kWidth;
    __syncwarp();
    char* block = staging.block(i);
    if constexpr (kScaled) {
      const auto scaled = [&](float (&x)[4], int at) { scales.apply(x, i / kBlocks, shared, at); };
      stage_block<Out>(block, d[i / kBlocks], i % kBlocks * (kWidth / 2), scaled);
    } else {
      stage_block<Out>(block, d[i / kBlocks], i % kBlocks * (kWidth / 2), NoScales());
    }
    if (staging.by_tma()) {
      if (i % kBlocks == kBlocks - 1) staging.commit(i / kBlocks);
      continue;
    }
    __syncwarp();
    store_rows(block, out + at_row * q.out_row_stride + at_column, q.out_row_stride, tile.rows - row - at_row,
               min(min(kWidth, 2 * kCount - at_column), q.n - column - at_column), p.whole_rows);
  }
}

// The same, with scales and bias only where there are any: without them, the code is short.
template <class Out, bool kScales, int kMBlocks, int kCount, class Scales, class Staging>
FI_DEVICE void gemm_epilogue(const GemmSm90Params& p, const float (&d)[kMBlocks][kCount], const Scales& scales,
                             const Staging& staging, typename Scales::Shared& shared, const GemmTile& tile, int row,
                             int column, int barrier) {
  if constexpr (kScales) {
    if (scales.any) return store_tile<Out, true>(p, d, scales, staging, shared, tile, row, column, barrier);
  }
  store_tile<Out, false>(p, d, scales, staging, shared, tile, row, column, barrier);
}

}  // namespace fi
