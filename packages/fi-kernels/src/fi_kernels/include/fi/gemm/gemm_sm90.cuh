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

// Tile: GemmTileSm90. Mainloop: Accumulate or Promote. Epilogue: one of StoreRows, StoreEither, StoreTma,
// StoreTmaHalves, StoreGated.
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
    if (threadIdx.x == 0) {
      prefetch_tensor_map(p.a);
      prefetch_tensor_map(p.b);
      if (Epilogue::kHeldStages > 0 && p.tma_stores) prefetch_tensor_map(p.out);
      shared.ring.pipeline.init(1, kConsumers * 4);
      shared.mainloop.init();
      shared.epilogue.init();
      fence_barrier_init();
    }
    __syncthreads();
    pdl_wait();
    const int warpgroup = warpgroup_index();
    if (warpgroup == kConsumers) {
      give_registers<kProducerRegisters>();
      const int warp = warp_index() % 4;
      if (warp == 0) {
        load_operands();
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
  // By a warp; lane 0 copies.
  FI_DEVICE void load_operands() const {
    typename Tile::Operands& operands = shared.operands;
    typename Tile::Ring& ring = shared.ring;
    Tiles tiles(p);
    GemmTile tile;
    const uint64_t b_policy = p.b_once ? kEvictFirst : kEvictNormal;
    PipelineState at = PipelineState::producer();
    while (tiles.next(tile)) {
      if (threadIdx.x % 32 == 0) {
        ring.pipeline.acquire(at);
        ring.tiles[at.stage] = tile;
        for (int k = 0; k < p.k_blocks; ++k) {
          ring.pipeline.acquire(at);
          Barrier& full = ring.pipeline.expect(at.stage, sizeof(operands) / Tile::kStages);
          tma_load_hinted(operands.a[at.stage], p.a, full, kEvictNormal, k * kBlockK, tile.row, tile.a_batch);
          char* b = operands.b[at.stage];
          if constexpr (Mainloop::kMnMajorB) {
            for (int c = 0; c < Tile::kColumns / kBlockK; ++c)
              tma_load_hinted(b + c * kBlockK * kSwizzleLineBytes, p.b, full, b_policy, tile.column + c * kBlockK,
                              k * kBlockK, tile.b_batch);
          } else if constexpr (Tile::kGated) {
            for (int i = 0; i < Tile::kColumns / Tile::kHalf; ++i)
              tma_load_hinted(b + i * Tile::kHalf * kSwizzleLineBytes, p.b, full, b_policy, k * kBlockK,
                              Tile::row_of_b(tile, i, p.problem.n), tile.b_batch);
          } else {
            tma_load_hinted(b, p.b, full, b_policy, k * kBlockK, tile.column, tile.b_batch);
          }
          at.advance(Tile::kStages);
        }
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
    for (;;) {
      shared.ring.pipeline.wait(at);
      const GemmTile tile = shared.ring.tiles[at.stage];
      if (uniform(tile.rows) == kNoTile) break;
      const auto scales = epilogue.begin(tile);
      float d[Mainloop::kMBlocks][Mainloop::kCount];
      mainloop.multiply(d, epilogue, at);
      epilogue.store(d, scales, tile, at.stage == 0 ? Tile::kStages - 1 : at.stage - 1);
    }
  }
};

template <class Tile, class Mainloop, class Epilogue, template <int, int> class Scheduler>
FI_DEVICE void gemm_sm90(const typename Epilogue::Params& params) {
  using Kernel = GemmSm90<Tile, Mainloop, Epilogue, Scheduler>;
  using Shared = typename Kernel::Shared;
  Kernel{params, gemm_of(params), dynamic_shared<Shared, 1024, kGemmSharedBytes>()}.run();
}

}  // namespace fi
