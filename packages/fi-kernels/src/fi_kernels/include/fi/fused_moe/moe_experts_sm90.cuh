// The products of a fused MoE for few tokens an expert on Hopper: weights of the experts that have rows stream through
// a TMA ring as the 64-row operand of wgmma, and their rows, gathered, are its columns.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/movmatrix.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/fused_moe/expert_slots.cuh"
#include "fi/fused_moe/fp4_mainloop_sm90.cuh"
#include "fi/fused_moe/token_rows_sm90.cuh"
#include "fi/gemm/small_m_mainloop_sm90.cuh"
#include "fi/quantization/e2m1.cuh"

namespace fi {

// What differs between weights W that are themselves an operand, and mxfp4 (E2m1).
template <class W, class In, int kTokens, int kWarpgroups, int kBlocks, int kStages>
struct ExpertWeights {
  static constexpr bool kFp4 = false, kBlockScales = sizeof(W) == 1;
  static constexpr int kBlockBoxK = kSwizzleLineBytes / sizeof(W);  // elements of the tensor map
  using Mainloop = SmallMMainloop<W, W, kTokens, kWarpgroups, kBlocks, kStages, kBlockScales ? 128 : 0, kBlockScales>;
  using Rows = TokenRows<In, (sizeof(In) > sizeof(W) ? TokenForm::kQuantized : TokenForm::kSame), kTokens, kBlocks>;
};
template <class In, int kTokens, int kWarpgroups, int kBlocks, int kStages>
struct ExpertWeights<E2m1, In, kTokens, kWarpgroups, kBlocks, kStages> {
  static constexpr bool kFp4 = true, kBlockScales = false;
  static constexpr int kBlockBoxK = kSwizzleLineBytes;
  static_assert(kBlocks == 1, "256 k");
  using Mainloop = Fp4Mainloop<In, kTokens, kWarpgroups, kStages>;
  using Rows = TokenRows<In, TokenForm::kInParts, kTokens, 1>;
};

// A tile has kTokens rows of one expert by kWarpgroups * 64 rows of weights; gated, half of these are features.
// W: of weights; In: of the rows in memory, also of those that the first product writes. Each of the kLoaders warps
// fills every kLoaders-th stage with rows. 8-bit weights have scales of 128 x 128.
//
// Persistent CTAs claim tiles, those of the first product first. The warp that streams weights runs ahead of all
// others, also from the first product to the second: only rows wait for rows. As tiles are claimed in order, a CTA
// waits for none that has not begun.
//
// The order of additions depends on k only: a row's result is the same in any batch.
template <class W, class In, class Out, int kTokens, int kWarpgroups, int kBlocks, int kStages, int kLoaders,
          ExpertActivation kAct>
struct ExpertGemmKernel {
  using Weights = ExpertWeights<W, In, kTokens, kWarpgroups, kBlocks, kStages>;
  using Mainloop = typename Weights::Mainloop;
  using Rows = typename Weights::Rows;
  static constexpr bool kBlockScales = Weights::kBlockScales, kGated = is_gated(kAct);
  static constexpr int kRows = 64 * kWarpgroups, kConsumers = 128 * kWarpgroups, kLine = kSwizzleLineBytes;
  static constexpr int kGroups = kTokens / 8, kScales = Mainloop::kScales;
  static constexpr bool kSorts = kTokens <= kMostSortedTokens;  // the kernel may sort few slots by itself
  static constexpr int kThreads = kConsumers + 32 + 32 * kLoaders, kQueue = 4;
  static_assert(kLoaders <= kStages, "a loader more than a ring ahead of another waits for a wrong phase");
  static_assert(32 % kBlocks == 0 && kWarpgroups <= 4, "scales of 32 blocks at a time, of 256 rows at most");

  struct Shared {
    typename Mainloop::Operands operands;
    typename Mainloop::Scales scales;
    ExpertPasses passes;
    SlotTable slots;
    int queue[kQueue];  // tiles of this CTA
    Pipeline<kQueue, Writer::kThreads, Reader::kLoads> claims;
    typename Mainloop::Ring pipeline;
  };
  struct Tile {
    const ExpertGemm* gemm;
    ExpertPass pass;
    int pass_index, feature;  // the first feature
  };

  const ExpertGemmParams& p;
  Shared& shared;

  FI_DEVICE void run() {
    const int warp = warp_index();
    if (warp == kConsumers / 32) begin();
    __syncthreads();  // all roles meet at one place of the code
    if (warp == kConsumers / 32) {
      load_weights();
    } else {
      pdl_wait();
      if (warp > kConsumers / 32)
        load_rows(warp - kConsumers / 32 - 1);
      else
        consume();
    }
  }

 private:
  FI_DEVICE bool sorts() const { return kSorts && p.slots.ids; }
  FI_DEVICE static int features_of(const ExpertGemm& g) { return g.gated ? kRows / 2 : kRows; }
  FI_DEVICE static int tiles_of(const ExpertGemm& g) { return (g.features + features_of(g) - 1) / features_of(g); }
  FI_DEVICE static int steps_of(const ExpertGemm& g) { return (g.k_blocks + kBlocks - 1) / kBlocks; }

  // False: there is no tile `index`.
  FI_DEVICE bool tile_at(int index, Tile& tile) const {
    for (int i = 0; i < p.products; ++i) {
      const ExpertGemm& g = p.gemm[i];
      const int tiles = tiles_of(g), all = tiles * shared.passes.count;
      if (index < all) {
        const int pass = index / tiles;
        tile = {&g, shared.passes.passes[pass], pass, (index - pass * tiles) * features_of(g)};
        return true;
      }
      index -= all;
    }
    return false;
  }
  // The next tile that load_weights has claimed; by the other warps.
  FI_DEVICE bool next(PipelineState& at, Tile& tile) const {
    shared.claims.wait(at);
    const int index = shared.queue[at.stage];
    shared.claims.release_warp(at.stage);
    at.advance(kQueue);
    return tile_at(index, tile);
  }

  // By the warp that loads weights: barriers and the table of passes.
  FI_DEVICE void begin() {
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < p.products; ++i) prefetch_tensor_map(p.gemm[i].weights);
      shared.pipeline.init(2, Mainloop::kReleases);
      shared.claims.init(1, 4 * kWarpgroups + kLoaders);
      fence_barrier_init();
    }
    __syncwarp();
    if (sorts()) {  // ids are complete before the kernel ahead in the stream began
      shared.slots.template build<kTokens>(shared.passes, p.slots, p.experts);
    } else {
      if (!p.ready) pdl_wait();
      shared.passes.template build<kTokens>(p.offsets, p.experts);
    }
  }

  // By a warp.
  FI_DEVICE void load_weights() {
    pdl_launch_dependents();
    if (threadIdx.x % 32 != 0) return;
    const uint64_t policy = p.weights_once ? kEvictFirst : kEvictNormal;
    PipelineState at = PipelineState::producer(), claim = at;
    bool waited = !sorts() && !p.ready;
    for (int index = blockIdx.x;;) {
      shared.claims.acquire(claim);
      shared.queue[claim.stage] = index;
      shared.claims.commit(claim.stage);
      claim.advance(kQueue);
      Tile tile;
      if (!tile_at(index, tile)) return;
      if (waited) index = claim_tile(index);
      const int steps = steps_of(*tile.gemm);
      for (int i = 0; i < steps; ++i, at.advance(kStages)) {
        shared.pipeline.acquire(at);
        Barrier& full = shared.pipeline.expect(at.stage, kBlocks * kRows * kLine);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
          load_box(tile, i * kBlocks + block, shared.operands.b[at.stage][block], full, policy);
      }
      if (!waited) {  // the kernel ahead writes the counters
        pdl_wait();
        waited = true;
        index = claim_tile(index);
      }
    }
  }
  // Behind the last block of k a box is zeros.
  FI_DEVICE static void load_box(const Tile& tile, int block, char* to, Barrier& full, uint64_t policy) {
    const ExpertGemm& g = *tile.gemm;
    const int apart = block < g.k_blocks ? tile.pass.expert * g.k_blocks + block : 0x7fffffff;
    tma_load(to, g.weights, full, g.k_apart ? 0 : block * Weights::kBlockBoxK, 0, 0, tile.feature / 8,
             g.k_apart ? apart : tile.pass.expert, policy);
  }
  FI_DEVICE int claim_tile(int index) const {
    return static_cast<int>(gridDim.x) + (p.progress ? atomicAdd(p.progress, 1) : index);
  }

  // Scales of a tile's weights: those of 32 blocks of k at a time in the lanes of a warp, as a scale that is loaded for
  // each stage is as late as the weights are. [0] of a warpgroup's up rows (or all), [1] of its gate rows.
  struct WeightScales {
    const float* rows[2];
    float scale[2];
    int blocks;

    FI_DEVICE void locate(const ExpertGemm& g, const Tile& tile) {
      const float* of_expert =
          static_cast<const float*>(g.weight_scale) + tile.pass.expert * g.weight_scale_expert_stride;
      const int last = g.features - 1, other = g.gated ? g.features + tile.feature : min(tile.feature + 128, last);
      rows[0] = of_expert + tile.feature / 128 * g.weight_scale_row_stride;
      rows[1] = of_expert + other / 128 * g.weight_scale_row_stride;
      blocks = g.k_blocks;
      load(0);
    }
    // Of blocks `first` to first + 31.
    FI_DEVICE void load(int first) {
      const int block = min(first + static_cast<int>(threadIdx.x) % 32, blocks - 1);
      scale[0] = rows[0][block];
      scale[1] = rows[1][block];
    }
    // The scales of a block in the order of the mainloop: a pair for each warpgroup. By all lanes.
    FI_DEVICE float of(const ExpertGemm& g, int block) const {
      const float up = __shfl_sync(0xffffffffu, scale[0], block % 32);
      const float gate = __shfl_sync(0xffffffffu, scale[1], block % 32);
      const int lane = threadIdx.x % 32;
      return (g.gated ? lane % 2 : lane / 4) ? gate : up;
    }
  };

  // By a warp: rows of tokens and the scales of blocks.
  FI_DEVICE void load_rows(int loader) {
    PipelineState at = PipelineState::producer(), claim;
    int next_loader = 0;  // of the next stage
    Tile tile;
    while (next(claim, tile)) {
      const ExpertGemm& g = *tile.gemm;
      WeightScales scales;
      if constexpr (kBlockScales) scales.locate(g, tile);
      if (&g != p.gemm) await_rows(tile);
      Rows rows(g.in, g.in_row_stride, g.k);
      const int32_t* source = sorts() && g.source ? shared.slots.tokens : g.source;
      rows.locate(source, tile.pass.row, tile.pass.count);
      const int steps = steps_of(g);
      for (int i = 0; i < steps; ++i, at.advance(kStages)) {
        if (kBlockScales && i > 0 && i * kBlocks % 32 == 0) scales.load(i * kBlocks);
        const bool own = next_loader == loader;
        if (++next_loader == kLoaders) next_loader = 0;
        if (own) load_stage(tile, rows, scales, i * kBlocks, at);
      }
    }
  }
  // Waits until the first product of a pass is complete.
  FI_DEVICE void await_rows(const Tile& tile) const {
    const int warps = tiles_of(p.gemm[0]) * kWarpgroups * 4;
    while (load_device(p.progress + 1 + tile.pass_index) < warps) {
    }
    __syncwarp();
  }
  FI_DEVICE void load_stage(const Tile& tile, const Rows& rows, const WeightScales& scales, int block,
                            const PipelineState& at) {
    const ExpertGemm& g = *tile.gemm;
    const int lane = threadIdx.x % 32;
    uint2 codes[kRows / 32];
    if constexpr (Weights::kFp4) {
#pragma unroll
      for (int i = 0; i < kRows / 32; ++i) codes[i] = scale_codes(tile, i * 32 + lane, block * 8);
    }
    rows.load(reinterpret_cast<char (*)[kTokens * Rows::kPieceBytes]>(shared.operands.a[at.stage]),
              token_scales(at.stage), block, [&] { shared.pipeline.acquire(at); });
    if constexpr (Weights::kFp4) {
#pragma unroll
      for (int i = 0; i < kRows / 32; ++i)
        shared.scales.b[at.stage][0][i * 32 + lane] = {bf16_scales(codes[i].x, 0x4140), bf16_scales(codes[i].x, 0x4342),
                                                       bf16_scales(codes[i].y, 0x4140),
                                                       bf16_scales(codes[i].y, 0x4342)};
    } else if constexpr (kBlockScales) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float scale = scales.of(g, block + b);
        if (lane < kScales) shared.scales.b[at.stage][b][lane] = scale;
      }
    }
    shared.pipeline.commit_warp(at.stage, lane);
  }
  FI_DEVICE float (*token_scales(int stage)) [kTokens] {
    if constexpr (kBlockScales || Weights::kFp4)
      return shared.scales.a[stage];
    else
      return nullptr;
  }
  // The ue8m0 scales of eight groups of 32 k, from group `first` on, of row `row` of a tile; zeros behind the last.
  FI_DEVICE static uint2 scale_codes(const Tile& tile, int row, int first) {
    const ExpertGemm& g = *tile.gemm;
    const int feature = min(g.gated ? tile.feature + row / 16 * 8 + row % 8 : tile.feature + row, g.features - 1);
    const int64_t of_row = g.gated && row / 8 % 2 ? g.features + feature : feature;
    const auto* from = static_cast<const uint8_t*>(g.weight_scale) + tile.pass.expert * g.weight_scale_expert_stride +
                       of_row * g.weight_scale_row_stride + first;
    // Aligned words that have a byte of the row, without a branch: the loads of all rows are in flight together.
    const int left = min(8, g.k / 32 - first), shift = static_cast<int>(reinterpret_cast<uint64_t>(from) % 8) * 8;
    const auto* words = reinterpret_cast<const unsigned long long*>(from - shift / 8);
    const unsigned long long low = words[0], high = words[shift / 8 + left > 8];
    const unsigned long long x = (low >> shift | high << 1 << (63 - shift)) & ~0ull >> (64 - 8 * left);
    return {static_cast<unsigned>(x), static_cast<unsigned>(x >> 32)};
  }
  // The two codes that `bytes` selects, of 2^(code - 127), as bf16. 255 becomes NaN.
  FI_DEVICE static unsigned bf16_scales(unsigned codes, unsigned bytes) {
    const unsigned x = __vmaxu2(__byte_perm(codes, 0, bytes) << 7, 0x00400040u);  // 2^-127 is subnormal
    return x | ((x + 0x00800080u) >> 9 & 0x00400040u);
  }

  FI_DEVICE void consume() {
    const int warp = warp_index();
    Mainloop mainloop(shared.operands, shared.scales, shared.pipeline, 0);
    PipelineState at, claim;
    Tile tile;
    if (sorts() && shared.passes.count == 0) zero_sums<Out>(p.slots, p.gemm[1], kConsumers);
    while (next(claim, tile)) {
      const ExpertGemm& g = *tile.gemm;
      mainloop.steps = steps_of(g);
      if constexpr (Weights::kFp4) mainloop.groups = g.k / 32;
      const ExpertConstants constants = constants_of(tile.pass.expert);
      float bias[2] = {0, 0};
      if (g.activated && g.bias) {
        const In* of_expert = static_cast<const In*>(g.bias) + tile.pass.expert * g.bias_row_stride;
        const int row =
            min(tile.feature + static_cast<int>(threadIdx.x) % 32 / 4 + warp * (kGated ? 8 : 16), g.features - 1);
        const int paired = row / 8 * 16 + row % 8;
        bias[0] = to_float(of_expert[g.order.paired ? paired : row]);
        bias[1] = to_float(of_expert[g.order.paired ? paired + 8
                                     : kGated       ? g.features + row
                                                    : min(row + 8, g.features - 1)]);
      }
      const bool adds = p.delta && g.activated;
      In delta[4] = {};  // of the first group: it arrives while the products are computed, and is converted behind them
      if (adds) load_delta(tile, warp, 0, delta);
      float sum[Mainloop::kCount];
      mainloop.run(sum, at);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (i * 8 >= tile.pass.count) break;
        float (&d)[4] = reinterpret_cast<float (&)[4]>(sum[i * 4]);
        if (!g.activated) {
          store_two(tile, warp, i, d);
          continue;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) d[j] += bias[j / 2];
        if (adds) {
          if (i > 0) load_delta(tile, warp, i, delta);
#pragma unroll
          for (int j = 0; j < 4; ++j) d[j] += to_float(delta[j]);
        }
        if constexpr (kGated) {
          store(tile, warp * 8, i, activate_expert<CudaMath, kAct>(d[0], d[2], constants),
                activate_expert<CudaMath, kAct>(d[1], d[3], constants));
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) d[j] = activate_expert<CudaMath, kAct>(d[j], 0.f, constants);
          store_two(tile, warp, i, d);
        }
      }
      if (p.products > 1 && &g == p.gemm) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) signal_device(p.progress + 1 + tile.pass_index);
      } else if (sorts()) {
        sum_finished(tile, tile.feature + warp * kSummedFeatures);
      }
    }
  }

  // By a warp that has stored features of the second product: that of the last pass sums them. It waits for tiles that
  // were claimed before its own.
  FI_DEVICE void sum_finished(const Tile& tile, int feature) const {
    if (feature >= tile.gemm->features) return;
    int* finished = p.progress + 1 + kMaxSlots + feature / kSummedFeatures;
    const int others = shared.passes.count - 1;
    __syncwarp();
    if (tile.pass_index < others) {
      if (threadIdx.x % 32 == 0) signal_device(finished);
      return;
    }
    while (load_device(finished) < others) {
    }
    __syncwarp();
    sum_slots<Out>(p.slots, shared.slots, *tile.gemm, feature);
  }

  // What is added to the sums of a group of 8 tokens: of both projections of a feature, or of two features. Behind the
  // last token and feature it is that of the last one, whose sums are not stored.
  FI_DEVICE void load_delta(const Tile& tile, int warp, int group, In (&delta)[4]) const {
    const ExpertGemm& g = *tile.gemm;
    const int lane = threadIdx.x % 32, first = tile.feature + warp * (kGated ? 8 : 16) + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int feature = feature_of_row(min(kGated ? first : first + half * 8, g.features - 1), g.order.step);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = min(group * 8 + lane % 4 * 2 + j, tile.pass.count - 1);
        const In* row = static_cast<const In*>(p.delta) + (tile.pass.row + token) * p.delta_row_stride;
        delta[half * 2 + j] = row[kGated && half == 0 ? g.features + feature : feature];
      }
    }
  }

  FI_DEVICE ExpertConstants constants_of(int expert) const {
    return {p.alpha ? p.alpha[expert] : p.constants.alpha, p.beta ? p.beta[expert] : p.constants.beta,
            p.limit ? p.limit[expert] : p.constants.limit};
  }

  // By a warp: its two blocks of 8 features.
  FI_DEVICE static void store_two(const Tile& tile, int warp, int group, const float (&d)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) store(tile, warp * 16 + h * 8, group, d[h * 2], d[h * 2 + 1]);
  }
  // By a warp: 8 features by the 8 tokens of a group; lane l has feature l / 4 of tokens 2 (l % 4) and the next.
  FI_DEVICE static void store(const Tile& tile, int feature, int group, float x, float y) {
    static_assert(sizeof(Out) == 2, "pairs of features");
    const int lane = threadIdx.x % 32;
    const unsigned pair = movmatrix_trans(pack_pair(x, y, Out()));
    const ExpertGemm& g = *tile.gemm;
    const int token = group * 8 + lane / 4, row = tile.feature + feature + lane % 4 * 2;
    if (token >= tile.pass.count || row >= g.features) return;
    Out* out = static_cast<Out*>(g.out) + (tile.pass.row + token) * g.out_row_stride;
    if (g.order.step == 1) {
      *reinterpret_cast<unsigned*>(out + row) = pair;
    } else {
      const int at = feature_of_row(row, g.order.step);
      out[at] = reinterpret_cast<const Out*>(&pair)[0];
      out[at + g.order.step] = reinterpret_cast<const Out*>(&pair)[1];
    }
  }
};

// kBytes: of shared memory that the launch requests.
template <class W, class In, class Out, int kTokens, int kWarpgroups, int kBlocks, int kStages, int kLoaders,
          ExpertActivation kAct, int kBytes>
FI_DEVICE void expert_gemm_sm90(const ExpertGemmParams& p) {
  using Kernel = ExpertGemmKernel<W, In, Out, kTokens, kWarpgroups, kBlocks, kStages, kLoaders, kAct>;
  Kernel{p, dynamic_shared<typename Kernel::Shared, 1024, kBytes>()}.run();
}

}  // namespace fi
