// The epilogue of the Hopper GEMM for products whose operands may be exchanged: rows of the weights are those of a tile
// and tokens its columns, so out is the transposed tile.
#pragma once
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

// StoreRows, or with p.transposed the transposed tile: out[column, row] of a problem whose a is the weights. Warps
// stage 16 rows each of a block of 64 columns, and store 16 of its columns.
template <class Tile, class Out>
struct StoreEither : StoreRows<Tile, Out, true> {
  using Rows = StoreRows<Tile, Out, true>;
  using Rows::of_columns, Rows::out, Rows::p, Rows::StoreRows, Rows::warpgroup;

  template <int kMBlocks, int kCount>
  FI_DEVICE void store(const float (&d)[kMBlocks][kCount], const typename Rows::Scales& scales, const GemmTile& tile,
                       int) const {
    if (!p.transposed)
      Rows::store_tile(d, scales, tile, *this);
    else if (scales.any)
      store_transposed<true>(d, scales, tile);
    else
      store_transposed<false>(d, scales, tile);
  }

 private:
  template <bool kApply, int kMBlocks, int kCount>
  FI_DEVICE void store_transposed(const float (&d)[kMBlocks][kCount], const typename Rows::Scales& scales,
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
};

}  // namespace fi
