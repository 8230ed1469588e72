// GEMM on Hopper: persistent warp-specialised CTAs. A TMA warp fills a ring of operand tiles, a second warp brings the
// scales of blocks, two consumer warpgroups multiply (wgmma) and store, or further warps store what they have staged.
#pragma once
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/gemm/epilogue_sm90.cuh"
#include "fi/gemm/epilogue_tma_sm90.cuh"
#include "fi/gemm/epilogue_transposed_sm90.cuh"
#include "fi/gemm/mainloop_promote_sm90.cuh"
#include "fi/gemm/mainloop_sm90.cuh"

namespace fi {

FI_DEVICE const GemmSm90Params& gemm_of(const GemmSm90Params& params) { return params; }

// Tile: GemmTileSm90. Mainloop: Accumulate or Promote. Epilogue: one of StoreRows, StoreTransposed, StoreEither,
// StoreWhole, StoreTma, StoreTmaHalves, StoreGated.
template <class Tile, class Mainloop, class Epilogue, template <int, int> class Scheduler>
struct GemmSm90 {
  using Params = typename Epilogue::Params;
  using Tiles = Scheduler<Tile::kRows, Tile::kColumns>;
  static constexpr int kConsumers = Tile::kConsumers, kBlockK = kSwizzleLineBytes / sizeof(typename Mainloop::A);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(registers_fit(kProducerRegisters + kConsumers * kConsumerRegisters, 1 + kConsumers), "registers");
  static constexpr int kNoTile = -0x7fffffff;  // rows of the tile that ends the work

  struct Shared {
    typename Tile::Operands operands;
    typename Epilogue::Staged staged;
    typename Epilogue::Shared epilogue;
    typename Mainloop::Shared mainloop;
    typename Tile::Ring ring;
  };

  const Params& params;
  const GemmSm90Params& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const int warpgroup = warpgroup_index(), warp = warp_index() % 4;
    const bool loads = warpgroup == kConsumers && warp == 0;
    const int begun = loads ? begin() : 0;
    __syncthreads();
    pdl_wait();
    if (warpgroup == kConsumers) {
      give_registers<kProducerRegisters>();
      if (loads) {
        load_operands(begun);
      } else if (warp == 1) {
        if constexpr (Mainloop::kBlockScales) shared.mainloop.template load<Tiles>(p);
      } else if (p.tma_stores) {
        if constexpr (Epilogue::kHeldStages > 0) Epilogue{params, shared, warp - 2}.template store_tiles<Tiles>();
      }
    } else {
      take_registers<kConsumerRegisters>();
      consume(warpgroup);
    }
  }

 private:
  // The blocks of k of this CTA in a tile.
  FI_DEVICE int first_block(const GemmTile& tile) const {
    return Epilogue::kTransposes && tile.shared ? cluster_rank() * p.own_blocks : 0;
  }
  FI_DEVICE int blocks(const GemmTile& tile) const {
    return Epilogue::kTransposes && tile.shared ? min(p.own_blocks, p.k_blocks - first_block(tile)) : p.k_blocks;
  }
  // Tile number i of this CTA. Its cluster shares the last one.
  FI_DEVICE bool next(Tiles& tiles, GemmTile& tile, int i) const {
    if constexpr (!Epilogue::kTransposes) return tiles.next(tile);
    tile.shared = i == p.whole_tiles;
    if (tile.shared) tiles.next_tile = i * gridDim.x + cluster_index();
    const bool found = tiles.next(tile);
    tile.column = min(tile.column, p.last_column);
    return found;
  }
  // By a thread: copies a block of k of a tile to a stage.
  FI_DEVICE void load(const GemmTile& tile, int stage, int block) const {
    typename Tile::Operands& operands = shared.operands;
    const uint64_t a_policy = Epilogue::kTransposes && p.a_once ? kEvictFirst : kEvictNormal;
    const uint64_t b_policy = p.b_once ? kEvictFirst : kEvictNormal;
    const int k = block * kBlockK;
    Barrier& full = shared.ring.pipeline.expect(stage, sizeof(operands) / Tile::kStages);
    tma_load_hinted(operands.a[stage], p.a, full, a_policy, k, tile.row, tile.a_batch);
    char* b = operands.b[stage];
    if constexpr (Mainloop::kMnMajorB) {
      for (int c = 0; c < Tile::kColumns / kBlockK; ++c)
        tma_load_hinted(b + c * kBlockK * kSwizzleLineBytes, p.b, full, b_policy, tile.column + c * kBlockK, k,
                        tile.b_batch);
    } else if constexpr (Tile::kGated) {
      for (int i = 0; i < Tile::kColumns / Tile::kHalf; ++i)
        tma_load_hinted(b + i * Tile::kHalf * kSwizzleLineBytes, p.b, full, b_policy, k,
                        Tile::row_of_b(tile, i, p.problem.n), tile.b_batch);
    } else {
      constexpr int kRows = Tile::kColumns / Tile::kBoxes;
#pragma unroll
      for (int i = 0; i < Tile::kBoxes; ++i)
        tma_load_hinted(b + i * kRows * kSwizzleLineBytes, p.b, full, b_policy, k, tile.column + i * kRows,
                        tile.b_batch);
    }
  }
  // By the warp that loads: begins the barriers, and fills the ring with the first tile while the other warps start.
  // Returns the blocks that it has loaded.
  FI_DEVICE int begin() const {
    const bool first_lane = threadIdx.x % 32 == 0;
    if (first_lane) {
      prefetch_tensor_map(p.a);
      prefetch_tensor_map(p.b);
      if (Epilogue::kHeldStages > 0 && p.tma_stores) prefetch_tensor_map(p.out);
      shared.ring.pipeline.init(1, kConsumers * 4);
      shared.mainloop.init();
      shared.epilogue.init();
      fence_barrier_init();
    }
    Tiles tiles(p);
    GemmTile tile;
    pdl_wait();  // groups are read
    if (!next(tiles, tile, 0)) return 0;
    const int first = first_block(tile), count = min(blocks(tile), Tile::kStages);
    if (first_lane) {
      shared.ring.tiles[0] = tile;
#pragma unroll 1
      for (int i = 0; i < count; ++i) load(tile, i, first + i);
    }
    __syncwarp();
    return count;
  }
  // By the same warp: the rest. begun: blocks of the first tile that are under way.
  FI_DEVICE void load_operands(int begun) const {
    typename Tile::Ring& ring = shared.ring;
    Tiles tiles(p);
    GemmTile tile;
    PipelineState at = PipelineState::producer();
    if (begun == Tile::kStages)
      at.phase ^= 1;
    else
      at.stage = begun;
    for (int i = 0; next(tiles, tile, i); ++i) {
      if (threadIdx.x % 32 == 0) {
        const int first = first_block(tile), end = first + blocks(tile);
        if (begun == 0) {
          ring.pipeline.acquire(at);
          ring.tiles[at.stage] = tile;
        }
#pragma unroll 1
        for (int k = first + begun; k < end; ++k) {
          ring.pipeline.acquire(at);
          load(tile, at.stage, k);
          at.advance(Tile::kStages);
        }
        begun = 0;
        for (; Mainloop::kWholePasses && at.stage != 0; at.advance(Tile::kStages)) {  // empty stages
          ring.pipeline.acquire(at);
          ring.pipeline.commit(at.stage);
        }
      }
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) {
      ring.pipeline.acquire(at);
      ring.tiles[at.stage].rows = kNoTile;
      ring.pipeline.commit(at.stage);
    }
    __syncwarp();
    pdl_launch_dependents();
  }

  FI_DEVICE void consume(int warpgroup) const {
    Mainloop mainloop{p, shared, warpgroup};
    Epilogue epilogue{params, shared, warpgroup};
    PipelineState at;
    for (int i = 0;; ++i) {
      shared.ring.pipeline.wait(at);
      GemmTile tile = shared.ring.tiles[at.stage];
      if (uniform(tile.rows) == kNoTile) break;
      // Counted, not read: the compiler sees that all threads agree, so descriptors stay in uniform registers.
      if constexpr (Epilogue::kTransposes) tile.shared = i == p.whole_tiles;
      const auto scales = epilogue.begin(tile);
      float d[Mainloop::kMBlocks][Mainloop::kCount];
      mainloop.multiply(d, epilogue, at, blocks(tile));
      epilogue.store(d, scales, tile, at.stage == 0 ? Tile::kStages - 1 : at.stage - 1);
    }
    epilogue.finish();
  }
};

template <class Tile, class Mainloop, class Epilogue, template <int, int> class Scheduler>
FI_DEVICE void gemm_sm90(const typename Epilogue::Params& params) {
  using Kernel = GemmSm90<Tile, Mainloop, Epilogue, Scheduler>;
  using Shared = typename Kernel::Shared;
  Kernel{params, gemm_of(params), dynamic_shared<Shared, 1024, kGemmSharedBytes>()}.run();
}

}  // namespace fi
