// The epilogue of the Hopper GEMM for products whose operands may be exchanged: rows of the weights are those of a tile
// and tokens its columns, so out is the transposed tile.
#pragma once
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
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
// columns, and store 16 of its columns. A cluster sums its parts of a tile that it shares. kStagedBytes: as StoreRows.
template <class Tile, class Out, GemmScaled kScaled, int kStagedBytes = 64 * kSwizzleLineBytes>
struct StoreTransposed : StoreRows<Tile, Out, kScaled, kStagedBytes> {
  using Rows = StoreRows<Tile, Out, kScaled, kStagedBytes>;
  using Rows::of_columns, Rows::out, Rows::p, Rows::warpgroup;
  static constexpr bool kTransposes = true, kScales = kScaled == GemmScaled::kAlways;  // exchanged, there is no bias
  static constexpr int kBoxBytes = kGemmBoxColumns * kSwizzleLineBytes;

  char* const operands;

  template <class All>
  FI_DEVICE StoreTransposed(const GemmSm90Params& params, All& all, int of_warpgroup)
      : Rows(params, all, of_warpgroup), operands(all.operands.a[0]) {}

  template <int kMBlocks, int kCount>
  FI_DEVICE void store(const float (&d)[kMBlocks][kCount], const typename Rows::Scales& scales, const GemmTile& tile,
                       int) const {
    if (tile.shared)
      store_sums(d, scales, tile);
    else if (kScales && Rows::Scales::each(p.problem))
      store_tile<true>(d, scales, tile);
    else
      store_tile<false>(d, scales, tile);
  }
  FI_DEVICE void finish() const { bulk_wait_read<0>(); }  // shared memory ends with the CTA

 protected:
  // Each CTA leaves its part of the tile where operands were, and sums its own groups of 16 columns of all parts, in
  // the order of ranks. Those of two CTAs are under way together. The sums are staged behind the part for TMA stores.
  // H200, clocks of 128 x 160 by two CTAs: 5800; parts of one CTA after the other, sums in blocks that warps store:
  // 7900.
  template <int kMBlocks, int kCount>
  FI_DEVICE void store_sums(const float (&d)[kMBlocks][kCount], const typename Rows::Scales& scales,
                            const GemmTile& tile) const {
    constexpr int kVectors = kCount / 4, kGroups = kCount / 8;
    constexpr int kStep = kScales && kCount > 96 ? 1 : 2;  // groups that are read together; with two, 208 columns spill
    constexpr int kPartBytes = 4 * Tile::kRows * Tile::kColumns, kHalf = Tile::kColumns / 32 + 1;
    constexpr int kMostGroups = kGroups < kHalf ? kGroups : kHalf;
    static_assert(kCount % 8 == 0 && sizeof(typename Tile::Operands) >=
                                         kPartBytes + Tile::kConsumers * kMBlocks * kMostGroups * kBoxBytes,
                  "parts and sums fit");
    const GemmProblem& q = p.problem;
    const int row = Tile::row(warpgroup), column = tile.column + Tile::column(warpgroup);
    float4* const part =
        reinterpret_cast<float4*>(operands) + warpgroup * kMBlocks * kVectors * kWarpgroup + threadIdx.x % kWarpgroup;
    char* const sums = operands + kPartBytes + warpgroup * kMBlocks * kMostGroups * kBoxBytes;
    barrier_sync(1 + Tile::kConsumers, Tile::kConsumers * kWarpgroup);  // all have multiplied what parts overwrite
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        part[(i * kVectors + j) * kWarpgroup] = {d[i][4 * j], d[i][4 * j + 1], d[i][4 * j + 2], d[i][4 * j + 3]};
    if constexpr (kScales) scales.share(q, column, of_columns);
    cluster_sync();
    const int first = cluster_rank() * p.own_groups, last = min(first + p.own_groups, kGroups);
#pragma unroll 1
    for (int group = first; group < last; group += kStep) {
#pragma unroll
      for (int i = 0; i < kMBlocks; ++i) {
        float sum[kStep][8] = {};
        const float4* from = part + (i * kVectors + group * 2) * kWarpgroup;
#pragma unroll 1
        for (int rank = 0; rank < p.splits; rank += 2) {
          uint4 x[2][2 * kStep];
          const bool two = rank + 1 < p.splits;
          load_part(x[0], from, rank);
          if (two) load_part(x[1], from, rank + 1);
          add_part(sum, x[0]);
          if (two) add_part(sum, x[1]);
        }
#pragma unroll
        for (int g = 0; g < kStep; ++g) {
          const auto scaled = [&](float (&x)[4], int at) {
            if constexpr (kScales) scales.apply(x, i, of_columns, (group + g) * 16 + at);
          };
          if (group + g < last)
            stage_transposed<Out>(sums + (i * kMostGroups + group + g - first) * kBoxBytes, sum[g], 0, scaled);
        }
      }
    }
    store_boxes<kMBlocks>(sums, kMostGroups * kBoxBytes, tile, first, max(last - first, 0));
    cluster_arrive_relaxed();  // others may still read the part
    cluster_wait();
  }
  // By a warpgroup: boxes of 16 columns that it has staged, from column 16 * first on.
  template <int kMBlocks>
  FI_DEVICE void store_boxes(const char* staged, int block_bytes, const GemmTile& tile, int first, int boxes) const {
    fence_async_shared();  // order: writer: TMA stores read what every lane has staged
    warpgroup_sync(1 + warpgroup);
    const int i = threadIdx.x % 32 * 4 + threadIdx.x % kWarpgroup / 32;  // warps and their lanes take turns
    if (i < kMBlocks * boxes) {
      const int block = kMBlocks > 1 ? i / boxes : 0, box = i - block * boxes;
      tma_store(p.out, staged + block * block_bytes + box * kBoxBytes, tile.row + Tile::row(warpgroup) + block * 64,
                tile.column + Tile::column(warpgroup) + (first + box) * kGemmBoxColumns, tile.a_batch);
    }
    bulk_commit();
  }

 private:
  template <int kVectors>
  FI_DEVICE static void load_part(uint4 (&x)[kVectors], const float4* from, int rank) {
    const unsigned address = cluster_address(from, rank);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) x[j] = cluster_load_u32x4(address + j * kWarpgroup * sizeof(float4));
  }
  template <int kStep>
  FI_DEVICE static void add_part(float (&sum)[kStep][8], const uint4 (&x)[2 * kStep]) {
#pragma unroll
    for (int j = 0; j < 8 * kStep; ++j) sum[j / 8][j % 8] += __uint_as_float((&x[j / 4].x)[j % 4]);
  }

  template <bool kEach, int kMBlocks, int kCount>
  FI_DEVICE void store_tile(const float (&d)[kMBlocks][kCount], const typename Rows::Scales& scales,
                            const GemmTile& tile) const {
    constexpr int kWidth = 64, kBlocks = (2 * kCount + kWidth - 1) / kWidth;
    const GemmProblem& q = p.problem;
    const int row = Tile::row(warpgroup), column = tile.column + Tile::column(warpgroup);
    if constexpr (kEach) {
      warpgroup_sync(1 + warpgroup);  // all have read those of the tile before
      scales.share(q, column, of_columns);
    }
    Out* to = static_cast<Out*>(q.out) + tile.a_batch * q.out_batch_stride + column * q.out_row_stride + tile.row + row;
#pragma unroll
    for (int i = 0; i < kMBlocks * kBlocks; ++i) {
      const int at_row = i / kBlocks * 64, at_column = i % kBlocks * kWidth;
      warpgroup_sync(1 + warpgroup);  // the block before has been stored
      stage_transposed<Out>(out, d[i / kBlocks], at_column / 2, [&](float (&x)[4], int at) {
        if constexpr (kEach)
          scales.apply(x, i / kBlocks, of_columns, at);
        else
          scales.apply_one(x);
      });
      warpgroup_sync(1 + warpgroup);
      store_rows(out, to + at_column * q.out_row_stride + at_row, q.out_row_stride,
                 min(min(kWidth, 2 * kCount - at_column), q.n - column - at_column), tile.rows - row - at_row,
                 p.whole_rows);
    }
  }
};

// The transposed tile, or without p.transposed the rows of the tile.
template <class Tile, class Out, GemmScaled kScaled>
struct StoreEither : StoreTransposed<Tile, Out, kScaled> {
  using Transposed = StoreTransposed<Tile, Out, kScaled>;
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

// The transposed tile, staged as a whole in memory of its own, from where TMA stores it while the next tile is
// multiplied. out has aligned rows. H200, bf16, the time of StoreTransposed: tiles of 128 x 160 and 208 0.99.
template <class Tile, class Out, GemmScaled kScaled>
struct StoreWhole : StoreTransposed<Tile, Out, kScaled, Tile::kOwnColumns * Tile::kOwnRows * sizeof(Out)> {
  using Transposed = StoreTransposed<Tile, Out, kScaled, Tile::kOwnColumns * Tile::kOwnRows * sizeof(Out)>;
  using Transposed::of_columns, Transposed::out, Transposed::p, Transposed::warpgroup, Transposed::StoreTransposed;

  template <int kMBlocks, int kCount>
  FI_DEVICE void store(const float (&d)[kMBlocks][kCount], const typename Transposed::Scales& scales,
                       const GemmTile& tile, int) const {
    if (tile.shared)
      Transposed::store_sums(d, scales, tile);
    else if (Transposed::kScales && Transposed::Scales::each(p.problem))
      store_tile<true>(d, scales, tile);
    else
      store_tile<false>(d, scales, tile);
  }

 private:
  template <bool kEach, int kMBlocks, int kCount>
  FI_DEVICE void store_tile(const float (&d)[kMBlocks][kCount], const typename Transposed::Scales& scales,
                            const GemmTile& tile) const {
    constexpr int kWidth = 64, kBlocks = (2 * kCount + kWidth - 1) / kWidth, kBytes = 2 * kCount * kSwizzleLineBytes;
    bulk_wait_read<0>();
    warpgroup_sync(1 + warpgroup);  // the tile before has been stored
    if constexpr (kEach) {
      scales.share(p.problem, tile.column + Tile::column(warpgroup), of_columns);
      warpgroup_sync(1 + warpgroup);
    }
#pragma unroll
    for (int i = 0; i < kMBlocks * kBlocks; ++i)
      stage_transposed<Out>(out + i / kBlocks * kBytes + i % kBlocks * kWidth * kSwizzleLineBytes, d[i / kBlocks],
                            i % kBlocks * kWidth / 2, [&](float (&x)[4], int at) {
                              if constexpr (kEach)
                                scales.apply(x, i / kBlocks, of_columns, at);
                              else
                                scales.apply_one(x);
                            });
    Transposed::template store_boxes<kMBlocks>(out, kBytes, tile, 0, kCount / 8);
  }
};

}  // namespace fi
