// Epilogues of the Hopper GEMM that store tiles of 256 x 128 16-bit elements by TMA, while the next tile is multiplied.
#pragma once
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/gemm/epilogue_sm90.cuh"

namespace fi {

// What both have in common. A warpgroup stages its elements as four blocks of 64 rows by 128 bytes, two of which fit
// its own rows of a in a stage. A warp stores them and releases the stages.
template <class Tile>
struct TmaStore {
  static_assert(Tile::kOwnRows == 128 && Tile::kOwnColumns == 128, "tiles of 256 x 128");
  static constexpr int kBlockBytes = 64 * kSwizzleLineBytes;

  Barrier staged[Tile::kConsumers][2];  // 64 rows of the warpgroup are staged
  Barrier stored[Tile::kConsumers];     // and StoreTma's own memory has been read

  FI_DEVICE void init() {
    for (int w = 0; w < Tile::kConsumers; ++w) {
      for (int i = 0; i < 2; ++i) staged[w][i].init(4);
      stored[w].init(1);
    }
  }
  FI_DEVICE static char* in_stage(typename Tile::Operands& operands, int stage, int warpgroup, int i) {
    return operands.a[stage] + (warpgroup * 2 + i) * kBlockBytes;
  }
  // By whole warps, which have staged 64 rows.
  FI_DEVICE void commit(int warpgroup, int m_block) {
    fence_async_shared();  // order: writer: a TMA store reads what every lane has staged
    __syncwarp();
    if (threadIdx.x % 32 == 0) staged[warpgroup][m_block].arrive();  // order: lane: behind the fence of every lane
  }
  // By a thread: stores 64 rows.
  template <class Staging>
  FI_DEVICE void store(const Staging& from, const GemmTile& tile, int m_block, int phase) {
    const int w = from.warpgroup, column = tile.column + Tile::column(w);
    staged[w][m_block].wait(phase);
#pragma unroll
    for (int c = 0; c < 2; ++c)
      tma_store(from.p.out, from.block(m_block * 2 + c), column + c * 64, tile.row + Tile::row(w) + m_block * 64,
                tile.a_batch);
  }
};

// Behind the products of a tile: two blocks are staged in the operand of its last stage, the others have memory of
// their own. H200, 4096 x 24576 x 1536 with one scale: two such stages and one block of memory take 255.5 us, this
// 251.3, stores by the consumers 258.8. Tiles of 128 rows are slower with it: 4096 x 2112 x 7168 112.2 to 116.2.
template <class Tile, class Out>
struct StoreTma : StoreRows<Tile, Out, GemmScaled::kAlways, 2 * 64 * kSwizzleLineBytes> {
  using Rows = StoreRows<Tile, Out, GemmScaled::kAlways, 2 * 64 * kSwizzleLineBytes>;
  using Rows::out, Rows::p, Rows::warpgroup;
  static constexpr int kHeldStages = 1;
  struct Shared : Rows::Shared {
    TmaStore<Tile> stores;
    FI_DEVICE void init() { stores.init(); }
  };

  typename Tile::Operands& operands;
  typename Tile::Ring& ring;
  TmaStore<Tile>& stores;
  int last_stage = Tile::kStages - 1, stored_phase = 1;
  bool tma = false;

  template <class All>
  FI_DEVICE StoreTma(const GemmSm90Params& params, All& all, int of_warpgroup)
      : Rows(params, all, of_warpgroup), operands(all.operands), ring(all.ring), stores(all.epilogue.stores) {}

  FI_DEVICE typename Rows::Scales begin(const GemmTile& tile) {
    tma = takes(tile);
    return Rows::begin(tile);
  }
  FI_DEVICE bool by_tma() const { return tma; }
  template <int kCount>
  FI_DEVICE void store(const float (&d)[2][kCount], const typename Rows::Scales& scales, const GemmTile& tile,
                       int last) {
    last_stage = last;
    stores.stored[warpgroup].wait(stored_phase);
    Rows::store_tile(d, scales, tile, *this);
    if (tma) stored_phase ^= 1;
  }
  FI_DEVICE char* block(int i) const {
    if (!tma) return out;
    return i < 2 ? stores.in_stage(operands, last_stage, warpgroup, i) : out + (i - 2) * Rows::kBlockBytes;
  }
  FI_DEVICE void commit(int m_block) const { stores.commit(warpgroup, m_block); }

  template <class Tiles>
  FI_DEVICE void store_tiles() {
    Tiles tiles(p);
    GemmTile tile;
    int phase = 0;
    tma = true;
    while (tiles.next(tile)) {
      last_stage = (last_stage + p.k_blocks) % Tile::kStages;
      if (!takes(tile)) continue;
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) stores.store(*this, tile, i, phase);
        bulk_commit();
        bulk_wait_read<0>();
        // order: thread: this thread's copies have read both places; for four warps, which have staged them
        ring.pipeline.empty[last_stage].arrive(4);
        stores.stored[warpgroup].arrive();
        phase ^= 1;
      }
      __syncwarp();
    }
  }

 private:
  // Rows beyond the last of a tile may be those of another group.
  FI_DEVICE bool takes(const GemmTile& tile) const { return p.tma_stores && uniform(tile.rows) >= Tile::kRows; }
};

// Half before the last products, as block scales leave no memory for blocks: the first 64 rows of a warpgroup are
// staged in the stage before the last one, the other 64 behind their products in the last one. k is whole passes
// through the ring, so both stages are constants of the code; all tiles are stored so, without bias.
template <class Tile, class Out>
struct StoreTmaHalves {
  using Params = GemmSm90Params;
  using Shared = TmaStore<Tile>;
  struct Staged {};
  static constexpr int kHeldStages = 2;
  static constexpr bool kTransposes = false;

  const GemmSm90Params& p;
  typename Tile::Operands& operands;
  typename Tile::Ring& ring;
  Shared& shared;
  const int warpgroup;

  template <class All>
  FI_DEVICE StoreTmaHalves(const GemmSm90Params& params, All& all, int of_warpgroup)
      : p(params), operands(all.operands), ring(all.ring), shared(all.epilogue), warpgroup(of_warpgroup) {}

  FI_DEVICE NoScales begin(const GemmTile&) const { return {}; }
  FI_DEVICE bool by_tma() const { return true; }
  FI_DEVICE void finish() const {}
  template <int kCount>
  FI_DEVICE void before_last(const float (&d)[kCount]) const {
    stage(d, 0);
  }
  template <int kCount>
  FI_DEVICE void store(const float (&d)[2][kCount], NoScales, const GemmTile&, int) const {
    stage(d[1], 1);
  }
  FI_DEVICE char* block(int i) const {
    return Shared::in_stage(operands, Tile::kStages - kHeldStages + i / 2, warpgroup, i % 2);
  }

  template <class Tiles>
  FI_DEVICE void store_tiles() const {
    Tiles tiles(p);
    GemmTile tile;
    int phase = 0;
    while (tiles.next(tile)) {
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          shared.store(*this, tile, i, phase);
          bulk_commit();
          bulk_wait_read<0>();
          // order: thread: this thread's copies have read the stage; for four warps, which have staged it
          ring.pipeline.empty[Tile::kStages - kHeldStages + i].arrive(4);
        }
        phase ^= 1;
      }
      __syncwarp();
    }
  }

 private:
  // Stages 64 rows, whose memory is an operand that all warps have read.
  template <int kCount>
  FI_DEVICE void stage(const float (&d)[kCount], int m_block) const {
    warpgroup_sync(1 + warpgroup);
#pragma unroll
    for (int i = 0; i < 2; ++i) stage_block<Out>(block(m_block * 2 + i), d, i * 32, NoScales());
    shared.commit(warpgroup, m_block);
  }
};

}  // namespace fi
