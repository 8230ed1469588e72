// The epilogue of the Hopper GEMM for products whose operands may be exchanged: rows of the weights are those of a tile
// and tokens its columns, so out is the transposed tile.
#pragma once
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/gemm/epilogue_sm90.cuh"

namespace fi {

// Stages the accumulators of 64 rows and up to 64 columns, from accumulator `begin` on: a line of the block is a
// column.
template <class Out, int kCount, class Apply>
FI_DEVICE void stage_transposed(char* block, const float (&d)[kCount], int begin, const Apply& apply) {
  static_assert(sizeof(Out) == 2, "stmatrix");
  const int lane = threadIdx.x % 32, line = lane / 16 * 8 + lane % 8, chunk = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < 32; i += 8) {
    if (begin + i >= kCount) continue;
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = d[begin + i + j * 4 + e];
      apply(x, (begin + i) * 2 + j * 8);
      words[2 * j] = pack_pair(x[0], x[1], Out());
      words[2 * j + 1] = pack_pair(x[2], x[3], Out());
    }
    stmatrix_x4_trans(block + swizzled_offset(i * 2 + line, chunk), words);
  }
}

// The transposed tile: out[column, row] of a problem whose a is the weights. Warps stage 16 rows each of a block of 64
// columns, and store 16 of its columns. A cluster sums its parts of a tile that it shares. kApply: tiles have scales.
template <class Tile, class Out, bool kApply>
struct StoreTransposed : StoreRows<Tile, Out, kApply ? GemmScaled::kAlways : GemmScaled::kBias> {
  using Rows = StoreRows<Tile, Out, kApply ? GemmScaled::kAlways : GemmScaled::kBias>;
  using Rows::of_columns, Rows::out, Rows::p, Rows::warpgroup;
  static constexpr bool kTransposes = true;

  char* const operands;

  template <class All>
  FI_DEVICE StoreTransposed(const GemmSm90Params& params, All& all, int of_warpgroup)
      : Rows(params, all, of_warpgroup), operands(all.operands.a[0]) {}

  template <int kMBlocks, int kCount>
  FI_DEVICE void store(const float (&d)[kMBlocks][kCount], const typename Rows::Scales& scales, const GemmTile& tile,
                       int) const {
    if (tile.shared)
      store_sums(d, scales, tile);
    else
      store_tile(d, scales, tile);
  }

 private:
  template <int kMBlocks, int kCount>
  FI_DEVICE void store_tile(const float (&d)[kMBlocks][kCount], const typename Rows::Scales& scales,
                            const GemmTile& tile) const {
    constexpr int kWidth = 64, kBlocks = (2 * kCount + kWidth - 1) / kWidth;
    const GemmProblem& q = p.problem;
    const int row = Tile::row(warpgroup), column = tile.column + Tile::column(warpgroup);
    if constexpr (kApply) {
      warpgroup_sync(1 + warpgroup);  // all have read those of the tile before
      scales.share(q, column, of_columns);
    }
    Out* to = static_cast<Out*>(q.out) + tile.a_batch * q.out_batch_stride + column * q.out_row_stride + tile.row + row;
#pragma unroll
    for (int i = 0; i < kMBlocks * kBlocks; ++i) {
      const int at_row = i / kBlocks * 64, at_column = i % kBlocks * kWidth;
      warpgroup_sync(1 + warpgroup);  // the block before has been stored
      if constexpr (kApply) {
        const auto scaled = [&](float (&x)[4], int at) { scales.apply(x, i / kBlocks, of_columns, at); };
        stage_transposed<Out>(out, d[i / kBlocks], at_column / 2, scaled);
      } else {
        stage_transposed<Out>(out, d[i / kBlocks], at_column / 2, NoScales());
      }
      warpgroup_sync(1 + warpgroup);
      store_rows(out, to + at_column * q.out_row_stride + at_row, q.out_row_stride,
                 min(min(kWidth, 2 * kCount - at_column), q.n - column - at_column), tile.rows - row - at_row,
                 p.whole_rows);
    }
  }

  // Each CTA leaves its part of the tile where operands were, and sums its own groups of 16 columns of all parts, in
  // the order of ranks. Parts that are sent (st.async) take 4 % longer with two CTAs and as long with four.
  template <int kMBlocks, int kCount>
  FI_DEVICE void store_sums(const float (&d)[kMBlocks][kCount], const typename Rows::Scales& scales,
                            const GemmTile& tile) const {
    constexpr int kVectors = kCount / 4, kGroups = kCount / 8, kStep = 4;  // kStep: groups of a block
    static_assert(kCount % 8 == 0 && sizeof(typename Tile::Operands) >= 4 * Tile::kRows * (Tile::kColumns + 16 * kStep),
                  "parts fit, and what a block reads behind the last one");
    const GemmProblem& q = p.problem;
    const int row = Tile::row(warpgroup), column = tile.column + Tile::column(warpgroup);
    float4* const part =
        reinterpret_cast<float4*>(operands) + warpgroup * kMBlocks * kVectors * kWarpgroup + threadIdx.x % kWarpgroup;
    barrier_sync(1 + Tile::kConsumers, Tile::kConsumers * kWarpgroup);  // all have multiplied what parts overwrite
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        part[(i * kVectors + j) * kWarpgroup] = {d[i][4 * j], d[i][4 * j + 1], d[i][4 * j + 2], d[i][4 * j + 3]};
    if constexpr (kApply) scales.share(q, column, of_columns);
    cluster_sync();
    const int first = cluster_rank() * p.own_groups, last = min(first + p.own_groups, kGroups);
    Out* to = static_cast<Out*>(q.out) + tile.a_batch * q.out_batch_stride + column * q.out_row_stride + tile.row + row;
#pragma unroll 1
    for (int group = first; group < last; group += kStep) {
#pragma unroll
      for (int i = 0; i < kMBlocks; ++i) {
        float sum[8 * kStep] = {};
#pragma unroll 1
        for (int rank = 0; rank < p.splits; ++rank) {
          const unsigned from = cluster_address(part + (i * kVectors + group * 2) * kWarpgroup, rank);
          uint4 x[2 * kStep];
#pragma unroll
          for (int j = 0; j < 2 * kStep; ++j) x[j] = cluster_load_u32x4(from + j * kWarpgroup * sizeof(float4));
#pragma unroll
          for (int j = 0; j < 8 * kStep; ++j) sum[j] += __uint_as_float((&x[j / 4].x)[j % 4]);
        }
        warpgroup_sync(1 + warpgroup);  // the block before has been stored
        const auto scaled = [&](float (&x)[4], int at) {
          if constexpr (kApply) scales.apply(x, i, of_columns, group * 16 + at);
        };
        stage_transposed<Out>(out, sum, 0, scaled);
        warpgroup_sync(1 + warpgroup);
        store_rows(out, to + group * 16 * q.out_row_stride + i * 64, q.out_row_stride,
                   min(min(kStep, last - group) * 16, q.n - column - group * 16), tile.rows - row - i * 64,
                   p.whole_rows);
      }
    }
    cluster_arrive_relaxed();  // others may still read the part
    cluster_wait();
  }
};

// The transposed tile, or without p.transposed the rows of the tile.
template <class Tile, class Out, bool kApply>
struct StoreEither : StoreTransposed<Tile, Out, kApply> {
  using Transposed = StoreTransposed<Tile, Out, kApply>;
  using Transposed::StoreTransposed, Transposed::p;

  template <int kMBlocks, int kCount>
  FI_DEVICE void store(const float (&d)[kMBlocks][kCount], const typename Transposed::Scales& scales,
                       const GemmTile& tile, int last) const {
    if (p.transposed)
      Transposed::store(d, scales, tile, last);
    else
      Transposed::Rows::store(d, scales, tile, last);
  }
};

}  // namespace fi
