// GEMM for few tokens on Hopper: rows of b (weights) are the 64-row operand of wgmma and tokens are its columns. A warp
// streams weights through a deep TMA ring, another one tokens and scales, and CTAs of a cluster split k.
#pragma once
#include "fi/cuda/ptx/barrier.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/gemm/small_m_mainloop_sm90.cuh"
#include "fi/gemm/small_m_output_sm90.cuh"

namespace fi {

template <class Tiles>
struct IsBatched {
  static constexpr bool value = false;
};
template <int kRows, int kColumns>
struct IsBatched<BatchedTiles<kRows, kColumns>> {
  static constexpr bool value = true;
};

// A tile has kTokens rows of a by kWarpgroups * 64 rows of b. A stage has kBlocks blocks of 128 bytes along k.
// kScaleRows: rows of b that share the scale of 128 k, 1 or 128; 0: no block scales.
//
// The order of additions depends on n and k only: a token's result is the same in any batch.
template <class A, class B, class Out, int kTokens, int kWarpgroups, int kBlocks, int kStages, int kScaleRows,
          template <int, int> class Tiles>
struct GemmSmallM {
  using Mainloop = SmallMMainloop<A, B, kTokens, kWarpgroups, kBlocks, kStages, kScaleRows>;
  static constexpr bool kBlockScales = kScaleRows > 0, kSplits = kWarpgroups <= 2;
  static constexpr int kRows = 64 * kWarpgroups, kConsumers = 128 * kWarpgroups, kLine = kSwizzleLineBytes;
  static constexpr int kBlockK = kLine / sizeof(A), kGroups = kTokens / 8, kScales = Mainloop::kScales;
  static constexpr bool kBatched = IsBatched<Tiles<kTokens, kRows>>::value;
  static constexpr int kAhead = kStages < 4 ? kStages : 4;  // stages of weights that are loaded before roles meet

  using Output = SmallMOutput<Out, kTokens, kRows, !kBlockScales, kSplits>;

  struct Shared {
    typename Mainloop::Operands operands;
    typename Output::Shared output;
    typename Mainloop::Scales scales;
    typename Mainloop::Ring pipeline;
  };

  const GemmSm90Params& p;
  const bool b_constant;
  Shared& shared;
  Output output;
  int first, steps;  // first block of k and number of stages of this CTA

  FI_DEVICE GemmSmallM(const GemmSm90Params& params, Shared& s)
      : p(params),
        b_constant(params.b_constant),
        shared(s),
        output{params, s.output, kSplits ? static_cast<int>(cluster_size()) : 1,
               kSplits ? static_cast<int>(cluster_rank()) : 0} {
    first = 0;
    steps = (p.k_blocks + kBlocks - 1) / kBlocks;
    if (output.splits > 1) {
      const unsigned stages = steps, begin = stages * output.rank / output.splits;
      first = begin * kBlocks;
      steps = stages * (output.rank + 1) / output.splits - begin;
    }
  }

  // The first thing that loading warps do: 0.1 to 0.2 us of 12 to 25 on an H200.
  FI_DEVICE static void prefetch(const GemmSm90Params& p) {
    if (threadIdx.x == kConsumers) prefetch_tensor_map(p.b);
    if (threadIdx.x == kConsumers + 32) prefetch_tensor_map(p.a);
  }

  FI_DEVICE void run() {
    const int warp = warp_index();
    const int loaded = warp == kConsumers / 32 ? begin() : 0;
    __syncthreads();  // all roles meet at one place of the code
    if (output.splits > 1) cluster_arrive_relaxed();
    if (warp == kConsumers / 32) {
      load_weights(loaded);
    } else {
      pdl_wait();
      if (warp > kConsumers / 32)
        load_tokens();
      else
        consume();
    }
  }

 private:
  FI_DEVICE Tiles<kTokens, kRows> work() const {
    Tiles<kTokens, kRows> tiles(p);
    if constexpr (kBatched) {  // groups are not split
      if (output.splits > 1) {
        tiles.next_tile = blockIdx.x / output.splits;
        tiles.step = gridDim.x / output.splits;
      }
    }
    return tiles;
  }

  // Whether weights meet one or two tiles of tokens of one product. few_tokens_tile then finds a tile without division.
  FI_DEVICE bool few_tokens() const { return known() && p.problem.batch == 1 && p.problem.m <= 2 * kTokens; }
  FI_DEVICE GemmTile few_tokens_tile(int number) const {
    const int both = p.problem.m > kTokens, row = min((number & both) * kTokens, p.last_row);
    return {row, (number >> both) * kRows, p.problem.m - row, 0, 0};
  }
  FI_DEVICE bool next(Tiles<kTokens, kRows>& tiles, GemmTile& tile) const {
    if constexpr (kBatched) {
      if (few_tokens()) {
        tile = few_tokens_tile(tiles.next_tile);
        tiles.next_tile += tiles.step;
        return tile.column < p.problem.n;
      }
    }
    return tiles.next(tile);
  }

  // The block of k of stage i of a tile. With block scales each tile begins elsewhere, as CTAs that read the same
  // scales at the same time wait for each other. H200, 64 tokens: 4096 x 4096 17.7 -> 16.4 us, 7168 x 16384 43.4
  // -> 41.5; with one scale 14.8 -> 15.2 and 39.8 -> 40.9.
  FI_DEVICE int k_of(const GemmTile& tile, int i) const {
    if constexpr (kBlockScales) {
      i += tile.column / kRows % max(steps, 1);
      if (i >= steps) i -= steps;
    }
    return first + i * kBlocks;
  }

  // Whether tiles are known without reading memory.
  FI_DEVICE bool known() const { return kBatched && p.problem.rows == GemmRows::kBatched; }

  // By the warp that loads weights: initialises the barriers. With few tokens it loads the first stages before the
  // roles meet, and returns their number. The code before the first copy comes from DRAM, so it has no division: H200,
  // fp8 16 x 2112 x 7168 12.9 -> 12.4 us, bf16 16 x 4096 x 4096 16.2 -> 15.6.
  FI_DEVICE int begin() {
    const bool first_lane = threadIdx.x % 32 == 0;
    if (first_lane) {
      shared.pipeline.init(kBlockScales ? 34 : 2, Mainloop::kReleases);
      shared.output.partial_full.init(1);
      fence_barrier_init();
    }
    __syncwarp();
    if (!few_tokens()) return 0;
    if (!b_constant) pdl_wait();
    const int ahead = min(kAhead, steps);
    const GemmTile tile = few_tokens_tile(cluster_index());
    PipelineState at = PipelineState::producer();
    if (first_lane)
#pragma unroll 1
      for (int i = 0; i < ahead; ++i, at.advance(kStages)) load_stage(tile, k_of(tile, i), at);
    __syncwarp();
    return ahead;
  }
  FI_DEVICE void load_weights(int loaded) {
    if (!known() || !b_constant) pdl_wait();
    pdl_launch_dependents();
    Tiles<kTokens, kRows> tiles = work();
    GemmTile tile;
    PipelineState at = PipelineState::producer_at<kStages>(loaded);
    for (; next(tiles, tile); loaded = 0) {
      if (threadIdx.x % 32 == 0)
        for (int i = loaded; i < steps; ++i, at.advance(kStages)) {
          shared.pipeline.acquire(at);
          load_stage(tile, k_of(tile, i), at);
        }
      __syncwarp();
    }
    if (output.splits > 1) cluster_wait();
  }
  FI_DEVICE void load_stage(const GemmTile& tile, int k, const PipelineState& at) {
    const uint64_t policy = p.b_once ? kEvictFirst : kEvictNormal;
    Barrier& full = shared.pipeline.expect(at.stage, kBlocks * kRows * kLine);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      tma_load_hinted(shared.operands.b[at.stage][block], p.b, full, policy, (k + block) * kBlockK, tile.column,
                      tile.b_batch);
  }

  // By a warp: tokens and the scales of blocks.
  FI_DEVICE void load_tokens() {
    const int lane = threadIdx.x % 32;
    Tiles<kTokens, kRows> tiles = work();
    GemmTile tile;
    PipelineState at = PipelineState::producer();
    while (next(tiles, tile)) {
      const BlockScales scales(p.problem, tile, lane);
      for (int i = 0; i < steps; ++i, at.advance(kStages)) {
        const int k = k_of(tile, i);
        shared.pipeline.acquire(at);
        if (lane == 0) {
          Barrier& full = shared.pipeline.expect(at.stage, kBlocks * kTokens * kLine);
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            tma_load_hinted(shared.operands.a[at.stage][block], p.a, full, kEvictLast, (k + block) * kBlockK, tile.row,
                            tile.a_batch);
        }
        if constexpr (kBlockScales) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            scales.load(shared.scales.a[at.stage][block], shared.scales.b[at.stage][block],
                        min(k + block, p.k_blocks - 1), lane);
          shared.pipeline.commit_copies(at.stage);
        }
      }
      __syncwarp();
    }
    if (output.splits > 1) cluster_wait();
  }

  // Where the scales of a lane lie.
  struct BlockScales {
    static constexpr int kA = (kTokens + 31) / 32, kB = (kScales + 31) / 32;
    const float *a[kA], *b[kB];
    int64_t a_stride, b_stride;

    FI_DEVICE BlockScales(const GemmProblem& q, const GemmTile& tile, int lane)
        : a_stride(q.a_scale_k_stride), b_stride(q.b_scale_k_stride) {
      const int last = tile.row + max(tile.rows, 1) - 1;
#pragma unroll
      for (int i = 0; i < kA; ++i) {
        const int row = min(tile.row + i * 32 + lane, last);
        a[i] = q.a_scale + tile.a_batch * q.a_scale_batch_stride +
               (q.a_scale_rows == 1 ? row : row / 128) * q.a_scale_row_stride;
      }
#pragma unroll
      for (int i = 0; i < kB; ++i) {
        const int row = min(tile.column + (i * 32 + lane) * (kScaleRows == 1 ? 1 : 64), q.n - 1);
        b[i] = q.b_scale + tile.b_batch * q.b_scale_batch_stride +
               (kScaleRows == 1 ? row : row / 128) * q.b_scale_row_stride;
      }
    }
    FI_DEVICE void load(float* to_a, float* to_b, int k, int lane) const {
#pragma unroll
      for (int i = 0; i < kA; ++i)
        if (i * 32 + lane < kTokens) cp_async_4(to_a + i * 32 + lane, a[i] + k * a_stride);
#pragma unroll
      for (int i = 0; i < kB; ++i)
        if (i * 32 + lane < kScales) cp_async_4(to_b + i * 32 + lane, b[i] + k * b_stride);
    }
  };

  FI_DEVICE void consume() {
    const int warpgroup = warpgroup_index(), thread = threadIdx.x % 128;
    const int block = warpgroup * 8 + uniform(thread / 32) * 2;  // the first of this warp's two, of 8 rows
    Tiles<kTokens, kRows> tiles = work();
    Mainloop mainloop(shared.operands, shared.scales, shared.pipeline, steps);
    PipelineState at;
    GemmTile tile;
    while (tiles.next(tile)) {  // NOTE: with `next`, wgmma descriptors leave the uniform registers
      float sum[Mainloop::kCount];
      const int lane = thread % 32;
      typename Output::Factors rows[2]{};
      float tokens[(kTokens + 31) / 32]{};
      // Loaded here, the latency is that of the first stage. A thread of a cluster loads those of one row or token.
      if (output.splits == 1) {
#pragma unroll
        for (int h = 0; h < 2; ++h) rows[h] = output.row_factors(tile, (block + h) * 8 + lane / 4);
#pragma unroll
        for (int i = 0; i < (kTokens + 31) / 32; ++i) tokens[i] = output.token_factor(tile, i * 32 + lane);
      } else if (threadIdx.x < kRows) {
        rows[0] = output.row_factors(tile, threadIdx.x);
      } else {
        tokens[0] = output.token_factor(tile, threadIdx.x - kRows);
      }
      mainloop.run(sum, at);
      const int groups = min(kGroups, (tile.rows + 7) / 8);
      if (output.splits > 1)
        exchange(tile, block, groups, sum, rows[0], tokens[0]);
      else if (output.stores_pairs())
        output.template store_blocks<true>(tile, block, groups, sum, rows, tokens);
      else
        output.template store_blocks<false>(tile, block, groups, sum, rows, tokens);
    }
  }

  // Adds the tiles of the cluster and stores them.
  FI_DEVICE void exchange(const GemmTile& tile, int block, int groups, const float (&sum)[Mainloop::kCount],
                          typename Output::Factors row, float token) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) output.expect(groups);
    if (threadIdx.x < kRows)
      shared.output.rows[kSplits ? threadIdx.x : 0] = row;
    else if (threadIdx.x < kRows + kTokens)
      shared.output.tokens[kSplits ? threadIdx.x - kRows : 0] = token;
    barrier_sync(1, kConsumers);  // all operands have been read: their memory stages the sums
    auto* staged = reinterpret_cast<typename Output::Fragment*>(&shared.operands);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (g < groups) staged[(block + h) * groups + g][lane] = {sum[g * 4 + h * 2], sum[g * 4 + h * 2 + 1]};
    cluster_wait();  // barriers of the cluster are initialised
    output.send(staged, block, groups);
    output.template store_sums<4 * kWarpgroups>(tile, groups, warp_index());
  }
};

// kBytes: of shared memory that the launch requests.
template <class A, class B, class Out, int kTokens, int kWarpgroups, int kBlocks, int kStages, int kScaleRows,
          template <int, int> class Tiles, int kBytes>
FI_DEVICE void gemm_small_m_sm90(const GemmSm90Params& p) {
  using Kernel = GemmSmallM<A, B, Out, kTokens, kWarpgroups, kBlocks, kStages, kScaleRows, Tiles>;
  Kernel::prefetch(p);
  Kernel(p, dynamic_shared<typename Kernel::Shared, 1024, kBytes>()).run();
}

}  // namespace fi
