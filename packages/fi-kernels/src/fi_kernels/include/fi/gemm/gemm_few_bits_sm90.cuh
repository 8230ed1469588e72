// GEMM of few bf16 tokens and fp4 weights on Hopper: TMA streams weights through shared memory, they become bf16 in
// registers and meet tokens in mma.sync.
//
// The order of k in a product is free. A stage has 128 bytes of weights along k, of which two sets of warps take 64
// each. Lane c of the four that share a row of an mma fragment has 16 neighbouring bytes. No weight crosses lanes.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/gemm/fp4_weights_sm90.cuh"
#include "fi/gemm/gemm_few_bits.h"

namespace fi {

// A CTA multiplies kTokens tokens and 16 p.blocks rows of b, which row_warps warps share. 16 / row_warps sets of such
// warps split k: two sets take a stage, other two the next. Sums meet at the end.
//
// Each of four warps fills every fourth stage, so that the tokens of four stages are on their way. H200, n 28672: with
// one stage at a time a stage took 0.85 us whatever its size.
template <class Out, class Weights, int kTokens>
struct GemmFewBits {
  // kOwnK: of a lane that loads tokens: eight elements of each meet a word of weights.
  static constexpr int kStageK = 256, kOwnK = kStageK / 32;
  static constexpr int kConsumers = 16, kLoaders = kFewBitsLoaders, kMaxBlocks = kFewBitsWarpBlocks, kMaxStages = 16;
  static constexpr int kTokenTiles = kTokens / 8, kTokenBytes = kTokens * kStageK * 2;

  const GemmFewBitsParams& p;
  char* stages;
  using Stages = Pipeline<kMaxStages, Writer::kThreads, Reader::kLoads>;
  Stages& pipeline;
  int lane, warp, row, token;  // row, token: the first of the CTA
  int weight_bytes, stage_bytes;

  FI_DEVICE GemmFewBits(const GemmFewBitsParams& params, char* memory, Stages& barriers)
      : p(params), stages(memory), pipeline(barriers) {
    lane = threadIdx.x % 32;
    warp = warp_index();
    const int token_tiles = (p.m + kTokens - 1) / kTokens;  // CTAs beside each other share rows of b
    const int row_tile = token_tiles == 1 ? blockIdx.x : blockIdx.x / token_tiles;  // no division before the first copy
    row = row_tile * p.blocks * 16;
    token = (blockIdx.x - row_tile * token_tiles) * kTokens;
    weight_bytes = p.blocks * 16 * kSwizzleLineBytes;
    stage_bytes = weight_bytes + kTokenBytes + p.scale_blocks * Weights::kTiles * 512;
  }

  FI_DEVICE void run() {
    if (warp == kConsumers) begin();
    __syncthreads();
    pdl_wait();
    const bool consumes = warp < kConsumers;
    float sum[kMaxBlocks][kTokenTiles][4] = {};
    if (consumes) {
      consume(sum, share(warp));
    } else {
      produce(warp - kConsumers);
      pdl_launch_dependents();
    }
    __syncthreads();  // all stages have been read
    int again = warp;
    asm volatile("" : "+r"(again));  // the share is not kept in registers meanwhile, which are too few
    if (consumes) leave_sums(sum, share(again));
    __syncthreads();
    add_sums();
  }

 private:
  // What a warp multiplies: its set and its blocks of rows.
  struct Share {
    int set, first, count;
  };
  FI_DEVICE Share share(int of_warp) const {
    const int log = __ffs(p.row_warps) - 1, few = p.blocks >> log, more = p.blocks & (p.row_warps - 1);
    const int own = (of_warp + of_warp / 4) & (p.row_warps - 1);  // a scheduler has warps with a block more and others
    return {of_warp >> log, few * own + min(own, more), few + (own < more)};
  }

  FI_DEVICE int steps() const { return (p.k + kStageK - 1) / kStageK; }
  FI_DEVICE int sets() const { return kConsumers >> (__ffs(p.row_warps) - 1); }

  // By a warp: initialises the barriers and copies weights and scales of the first stage of each loading warp. All code
  // before the first copy comes from DRAM, so little precedes it.
  FI_DEVICE void begin() const {
    if (lane == 0) {
      prefetch_tensor_map(p.map);
      pipeline.init(1 + 32, 2 * p.row_warps);
      fence_barrier_init();
      pdl_wait();
#pragma unroll 1
      for (int i = 0; i < min(kLoaders, steps()); ++i) copy(stages + i * stage_bytes, pipeline.full[i], i * kStageK);
    }
    __syncwarp();
  }

  // Fills stages producer, producer + kLoaders, ..: those of no other warp, so that its waits see every phase.
  FI_DEVICE void produce(int producer) const {
    const int count = steps();
    PipelineState at{producer, 1};
    uint4 x[kTokens];
    if (producer < count) load_tokens(x, producer * kStageK);
    for (int i = producer; i < count; i += kLoaders) {
      pipeline.acquire(at);
      char* stage = stages + at.stage * stage_bytes;
      if (lane == 0 && i >= kLoaders) copy(stage, pipeline.full[at.stage], i * kStageK);
      store_tokens(x, stage + weight_bytes);
      pipeline.commit(at.stage);  // by all lanes: racecheck does not see an arrival for others
      if (i + kLoaders < count) load_tokens(x, (i + kLoaders) * kStageK);
      at.stage += kLoaders;
      if (at.stage >= p.stages) at.stage -= p.stages, at.phase ^= 1;
    }
  }

  // The weights and scales of a stage.
  FI_DEVICE void copy(char* stage, Barrier& full, int k) const {
    const uint64_t policy = p.m > kTokens ? kEvictNormal : kEvictFirst;
    const int tile = k / (4 * Weights::kGroup), tiles = min(Weights::kTiles, p.scale_tiles - tile);
    const int blocks = (min(row + p.blocks * 16, p.n) - 1) / 128 - row / 128 + 1;  // that the rows touch
    const int64_t block_bytes = static_cast<int64_t>(p.scale_tiles) * 512;
    const uint8_t* scales = p.scales + row / 128 * block_bytes + tile * 512;
    char* to = stage + weight_bytes + kTokenBytes;
    full.arrive_expect(weight_bytes + blocks * tiles * 512);
    tma_load_hinted(stage, p.map, full, policy, k / 2, row, 0);
#pragma unroll 1
    for (int i = 0; i < blocks; ++i)
      bulk_load(to + i * Weights::kTiles * 512, scales + i * block_bytes, tiles * 512, full, policy);
  }

  // Lane l has k kOwnK l .. kOwnK (l + 1) - 1 of every token.
  FI_DEVICE void load_tokens(uint4 (&x)[kTokens], int k) const {
    const bool exists = k + lane * kOwnK < p.k;
    const auto* from = static_cast<const __nv_bfloat16*>(p.a) + k + lane * kOwnK;
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
      x[i] = exists ? *reinterpret_cast<const uint4*>(from + min(token + i, p.m - 1) * p.a_row_stride) : uint4{};
  }
  // They become pairs as those of weights, as [half of k][tile][word][lane that reads it]. The last is permuted, so
  // that neither side has conflicts of banks.
  FI_DEVICE void store_tokens(const uint4 (&x)[kTokens], char* to) const {
    const int word = lane % 4, half = lane / 16, c = lane / 4 % 4;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int place = ((half * kTokenTiles + i / 8) * 4 + word) * 32 + ((i % 8 * 4 + c) ^ (2 * word));
      reinterpret_cast<uint4*>(to)[place] = Weights::pairs(x[i]);
    }
  }

  // The row of a block of 16, and 8 less than the other, that this lane has. Lanes of a quarter of a warp have rows r
  // and r + 4, whose neighbouring chunks swizzling puts into different banks.
  FI_DEVICE int line() const { return lane / 8 + lane / 4 % 2 * 4; }

  FI_DEVICE void consume(float (&sum)[kMaxBlocks][kTokenTiles][4], const Share& share) const {
    const int set = share.set, first = share.first, count = share.count;
    const int half = set % 2, groups = sets() / 2, chunk = lane % 4 + 4 * half, end = steps();
    const int weight_at = first * 16 * kSwizzleLineBytes + swizzled_offset(line(), chunk);
    const int token_at = weight_bytes + half * kTokenTiles * 128 * static_cast<int>(sizeof(uint4));
    const int scale_lane = weight_bytes + kTokenBytes + line() * 16 + Weights::place(chunk);
    int scale_at[kMaxBlocks];  // of the rows of each block, the same for all lanes
#pragma unroll
    for (int i = 0; i < kMaxBlocks; ++i) {
      const int at = row + (first + i) * 16;
      scale_at[i] = uniform((at / 128 - row / 128) * Weights::kTiles * 512 + at % 32 * 16 + at % 128 / 32 * 4);
    }
    PipelineState at{set / 2, 0};
    for (int i = set / 2; i < end; i += groups) {
      int offset = at.stage * stage_bytes;
      unsigned mask = Weights::mask((p.k - i * kStageK - chunk * kStageK / 8) / Weights::kGroup);
      // NOTE: values that the compiler does not know are not computed again for each block.
      asm volatile("" : "+r"(offset), "+r"(mask));
      const char* stage = stages + offset;
      pipeline.wait(at);
      const char *tokens = stage + token_at, *weights = stage + weight_at, *scales = stage + scale_lane;
      if (large_scales(scales, scale_at, count, mask))
        multiply<true>(sum, tokens, weights, scales, scale_at, count, mask);
      else
        multiply<false>(sum, tokens, weights, scales, scale_at, count, mask);
      pipeline.release_warp(at.stage, lane);
      at.stage += groups;
      if (at.stage >= p.stages) at.stage -= p.stages, at.phase ^= 1;
    }
  }

  // Whether a scale of the warp's blocks needs factors of any size.
  FI_DEVICE static bool large_scales(const char* scales, const int (&at)[kMaxBlocks], int count, unsigned mask) {
    if constexpr (!Weights::kLargeScales) {
      return false;
    } else {
      unsigned most = 0;
#pragma unroll
      for (int block = 0; block < kMaxBlocks; ++block)
        if (block < count) most = max(most, max(code(scales + at[block], 0, mask), code(scales + at[block], 8, mask)));
      return __any_sync(0xffffffffu, most > Weights::kMost);
    }
  }
  FI_DEVICE static unsigned code(const char* scales, int line, unsigned mask) {
    return Weights::code(reinterpret_cast<const uint8_t*>(scales) + line * 16, mask);
  }

  // Adds the products of 16 rows and half of the k of a stage of each block.
  template <bool kAny>
  FI_DEVICE void multiply(float (&sum)[kMaxBlocks][kTokenTiles][4], const char* tokens, const char* weights,
                          const char* scales, const int (&at)[kMaxBlocks], int count, unsigned mask) const {
#pragma unroll
    for (int block = 0; block < kMaxBlocks; block += kAny ? 1 : 2) {
      if (!kAny && block + 1 < count)
        multiply_blocks<kAny, kAny ? 1 : 2>(sum, block, tokens, weights, scales, at, mask);
      else if (block < count)
        multiply_blocks<kAny, 1>(sum, block, tokens, weights, scales, at, mask);
    }
  }

  // Of kBlocks blocks from `first` on. Two at a time keep more instructions in flight than one, and tokens that are
  // loaded again for each two leave them the registers. H200, 16 x 28672 x 8192: 53.1 -> 50.0 us.
  template <bool kAny, int kBlocks>
  FI_DEVICE void multiply_blocks(float (&sum)[kMaxBlocks][kTokenTiles][4], int first, const char* tokens,
                                 const char* weights, const char* scales, const int (&at)[kMaxBlocks],
                                 unsigned mask) const {
    using Factors = typename Weights::template Factors<kAny>;
    unsigned w[kBlocks][2][4];
    Factors scale[kBlocks][2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 x = *reinterpret_cast<const uint4*>(weights + ((first + b) * 16 + h * 8) * kSwizzleLineBytes);
        w[b][h][0] = x.x, w[b][h][1] = x.y, w[b][h][2] = x.z, w[b][h][3] = x.w;
        scale[b][h] = Factors(code(scales + at[first + b], h * 8, mask));
      }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint4 x[kTokenTiles];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
        x[t] = reinterpret_cast<const uint4*>(tokens)[(t * 4 + word) * 32 + (lane ^ (2 * word))];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        unsigned y[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Weights::dequantize(y[h], w[b][h][word]);
          scale[b][h].multiply(y[h], word);
        }
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            const unsigned of_weights[4] = {y[0][i], y[1][i], y[0][i + 1], y[1][i + 1]};
            mma_m16n8k16(sum[first + b][t], of_weights, (&x[t].x)[i], (&x[t].x)[i + 1], __nv_bfloat16());
          }
      }
    }
  }

  // Sums meet in shared memory as [set][token][row].
  FI_DEVICE int sums_stride() const { return p.blocks * 16 + 4; }
  FI_DEVICE void leave_sums(const float (&sum)[kMaxBlocks][kTokenTiles][4], const Share& share) const {
    const int set = share.set, first = share.first, count = share.count;
    float* sums = reinterpret_cast<float*>(stages) + first * 16 + line();
#pragma unroll
    for (int i = 0; i < kMaxBlocks; ++i)
      if (i < count)
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            sums[(set * kTokens + t * 8 + lane % 4 * 2 + e % 2) * sums_stride() + i * 16 + e / 2 * 8] = sum[i][t][e];
  }
  // Adds them in the order of sets and stores the results.
  FI_DEVICE void add_sums() const {
    const auto* sums = reinterpret_cast<const float*>(stages);
    const int rows = p.blocks * 16, stride = sums_stride();
    const float factor = Weights::kFactor * (p.alpha ? *p.alpha : 1.f);
    const int pairs = min(kTokens, p.m - token) * (rows / 2);
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      const int at = i / (rows / 2), pair = i % (rows / 2) * 2, column = row + pair;
      if (column >= p.n) continue;
      float2 x = {};
      for (int s = 0; s < sets(); ++s) {
        const float2 y = *reinterpret_cast<const float2*>(sums + (s * kTokens + at) * stride + pair);
        x.x += y.x, x.y += y.y;
      }
      const bool both = column + 1 < p.n;
      x.x *= factor, x.y *= factor;
      if (p.bias) {
        const Out* bias = static_cast<const Out*>(p.bias) + column;
        x.x += to_float(bias[0]);
        if (both) x.y += to_float(bias[1]);
      }
      Out* to = static_cast<Out*>(p.out) + (token + at) * p.out_row_stride + column;
      if (p.pairs && both) {
        if constexpr (sizeof(Out) == 2)
          *reinterpret_cast<unsigned*>(to) = pack_pair(x.x, x.y, Out());
        else
          *reinterpret_cast<float2*>(to) = x;
      } else {
        to[0] = from_float<Out>(x.x);
        if (both) to[1] = from_float<Out>(x.y);
      }
    }
  }
};

template <class Out, class Weights, int kTokens>
FI_DEVICE void gemm_few_bits(const GemmFewBitsParams& p) {
  using Kernel = GemmFewBits<Out, Weights, kTokens>;
  extern __shared__ uint4 memory[];
  __shared__ typename Kernel::Stages pipeline;
  Kernel(p, reinterpret_cast<char*>(memory) + shared_offset<1024>(memory), pipeline).run();
}

}  // namespace fi
