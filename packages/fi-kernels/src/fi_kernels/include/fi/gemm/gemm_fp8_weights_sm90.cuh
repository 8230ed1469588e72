// GEMM of few bf16 tokens and e4m3 weights on Hopper: TMA streams both through shared memory, weights become bf16 in
// registers and meet tokens in mma.sync, and the CTAs of a cluster may share k.
//
// The order of k in a product is free: lane c of the four that share a row of an mma fragment has 16 neighbouring
// weights and the same elements of a token, so that nothing crosses lanes.
//
// For 256 weights a warp issues 21.5 instructions with 8 tokens, 22.8 with 16, 25.3 with 32 and 30.3 with 64 (SASS of
// sm_90a, two blocks of rows): 16 dequantize, of which 8 run in the ALU, and 1, 2, 4 and 8 are mma.sync. Memory at 4.6
// TB/s leaves each of the four schedulers of an SM 51 slots for them.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/bf16.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/gemm/gemm_fp8_weights.h"

namespace fi {

// Two neighbouring e4m3 of a word as bf16. An e4m3 is s e e e e m m m: with the sign at bit 15 and the rest at bits 10
// to 4 it is a bf16 of 2^-120 of its value, subnormals included. Selectors of prmt with the highest bit repeat a sign.
template <bool kUpper>
FI_DEVICE unsigned bf16_of_e4m3(unsigned word) {
  unsigned spread;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(spread) : "r"(word), "n"(kUpper ? 0xB3A2 : 0x9180));
  return multiply_bf16x2(spread << 4 & 0x87f087f0u, 0x7b807b80u);  // 2^120
}

// A tile has kTokens rows of a by 16 p.blocks rows of b, which row_warps warps share. Sets of such warps split the k of
// a CTA: two sets take a stage, of 64 k each, other two the next. Sums meet at the end, those of a CTA in the order of
// sets, those of a cluster in the order of ranks.
template <class Out, int kTokens>
struct GemmFp8Weights {
  static constexpr int kConsumers = fp8_weights_warps(kTokens), kTokenTiles = kTokens / 8;
  static constexpr int kHalfBytes = kTokens * kSwizzleLineBytes;  // tokens of 64 k
  static constexpr int kAhead = 4;  // stages that are copied before roles meet: no ring has fewer
  using Sums = float[kFp8WeightsWarpBlocks][kTokenTiles][4];

  struct Barriers {
    Pipeline<kFp8WeightsStages, Writer::kCopies, Reader::kLoads> ring;
    Barrier partials;
  };

  const GemmFp8WeightsParams& p;
  char* memory;  // the ring, then partial sums of a cluster
  Barriers& barriers;
  int lane, warp, row, token;  // row, token: the first of the tile
  int rank, first, count;      // first, count: the stages of k of this CTA
  int weight_bytes, stage_bytes;
  float alpha = 1.f;

  FI_DEVICE GemmFp8Weights(const GemmFp8WeightsParams& params, char* shared, Barriers& b)
      : p(params), memory(shared), barriers(b) {
    lane = threadIdx.x % 32;
    warp = warp_index();
    const int cluster = cluster_index();
    const int row_tile = p.token_tiles == 1 ? cluster : cluster / p.token_tiles;  // no division before the first copy
    row = row_tile * p.blocks * 16;
    token = (cluster - row_tile * p.token_tiles) * kTokens;
    rank = cluster_rank();
    first = rank * p.own_stages;
    count = max(0, min(p.own_stages, p.k_stages - first));
    weight_bytes = p.blocks * 16 * kSwizzleLineBytes;
    stage_bytes = weight_bytes + 2 * kHalfBytes;
  }

  FI_DEVICE void run() {
    if (warp == kConsumers)
      begin();
    else if (threadIdx.x == 0)
      begin_rest();
    __syncthreads();
    if (p.splits > 1) cluster_arrive_relaxed();
    pdl_wait();
    if (p.alpha) alpha = *p.alpha;  // the latency is that of the first stage
    Sums sum = {};
    if (warp < kConsumers)
      consume(sum);
    else if (warp == kConsumers)
      load_weights();
    else
      load_tokens();
    __syncthreads();  // all stages have been read
    if (warp < kConsumers) leave_sums(sum);
    if (p.splits > 1) cluster_wait();  // the barriers of the cluster are initialised
    __syncthreads();
    if (p.splits > 1)
      exchange_sums();
    else
      add_sums();
  }

 private:
  // What a warp multiplies: its set and its blocks of rows.
  struct Share {
    int set, first, count;
  };
  FI_DEVICE Share share() const {
    const int log = __ffs(p.row_warps) - 1, few = p.blocks >> log, more = p.blocks & (p.row_warps - 1);
    const int set = warp >> log,
              own = (warp + set) & (p.row_warps - 1);  // a scheduler has warps with one and two blocks
    return {set, few * own + min(own, more), few + (own < more)};
  }
  FI_DEVICE int sets() const { return kConsumers >> (__ffs(p.row_warps) - 1); }

  // By a warp: copies the first weights before roles meet. All code before the first copy comes from DRAM, so little
  // precedes it: another warp initialises the other barriers.
  FI_DEVICE void begin() const {
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) barriers.ring.full[i].init(2);
      fence_barrier_init();
      pdl_wait();
#pragma unroll 1
      for (int i = 0; i < min(kAhead, count); ++i) copy_weights(i, i);
    }
    __syncwarp();
  }
  FI_DEVICE void begin_rest() const {
#pragma unroll
    for (int i = kAhead; i < kFp8WeightsStages; ++i) barriers.ring.full[i].init(2);
#pragma unroll
    for (int i = 0; i < kFp8WeightsStages; ++i) barriers.ring.empty[i].init(2 * p.row_warps);
    barriers.partials.init(1);
    fence_barrier_init();
  }

  // By a warp each: weights, and tokens, whose copies take as long to issue.
  FI_DEVICE void load_weights() const {
    pdl_launch_dependents();
    PipelineState at = p.stages > kAhead ? PipelineState{kAhead, 1} : PipelineState{0, 0};
    if (lane == 0)
      for (int i = kAhead; i < count; ++i, at.advance(p.stages)) {
        barriers.ring.acquire(at);
        copy_weights(i, at.stage);
      }
    __syncwarp();
  }
  FI_DEVICE void copy_weights(int i, int stage) const {
    tma_load_hinted(memory + stage * stage_bytes, p.b, barriers.ring.expect(stage, weight_bytes),
                    p.b_once ? kEvictFirst : kEvictNormal, (first + i) * kFp8WeightsStageK, row, 0);
  }
  FI_DEVICE void load_tokens() const {
    PipelineState at = PipelineState::producer();
    if (lane == 0)
      for (int i = 0; i < count; ++i, at.advance(p.stages)) {
        barriers.ring.acquire(at);
        char* to = memory + at.stage * stage_bytes + weight_bytes;
        Barrier& full = barriers.ring.expect(at.stage, 2 * kHalfBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          tma_load_hinted(to + half * kHalfBytes, p.a, full, kEvictLast, (first + i) * kFp8WeightsStageK + 64 * half,
                          token, 0);
      }
    __syncwarp();
  }

  // The row of a block of 16, and 8 less than the other, that this lane has. Lanes of a quarter of a warp have rows r
  // and r + 4, whose neighbouring chunks swizzling puts into different banks.
  FI_DEVICE int line() const { return lane / 8 + lane / 4 % 2 * 4; }

  FI_DEVICE void consume(Sums& sum) const {
    const Share own = share();
    const int half = own.set % 2, groups = sets() / 2;
    const int weight_at = own.first * 16 * kSwizzleLineBytes + swizzled_offset(line(), lane % 4 + 4 * half);
    const int token_at = weight_bytes + half * kHalfBytes + swizzled_offset(lane / 4, lane % 4 * 2);
    PipelineState at{own.set / 2, 0};
    for (int i = own.set / 2; i < count; i += groups) {
      const char* stage = memory + at.stage * stage_bytes;
      barriers.ring.wait(at);
      if (own.count > 1)
        multiply<2>(sum, stage + weight_at, stage + token_at);
      else
        multiply<1>(sum, stage + weight_at, stage + token_at);
      barriers.ring.release_warp(at.stage, lane);
      at.stage += groups;
      if (at.stage >= p.stages) at.stage -= p.stages, at.phase ^= 1;
    }
  }

  // Adds the products of 16 rows of each block and 64 k.
  template <int kBlocks>
  FI_DEVICE static void multiply(Sums& sum, const char* weights, const char* tokens) {
    uint4 w[kBlocks][2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        w[b][h] = *reinterpret_cast<const uint4*>(weights + (b * 16 + h * 8) * kSwizzleLineBytes);
    const auto offset = static_cast<unsigned>(__cvta_generic_to_shared(tokens)) & 16;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // of words
      unsigned y[kBlocks][2][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int word = 0; word < 2; ++word)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const unsigned x = (&w[b][h].x)[2 * pair + word];
            y[b][word][h] = bf16_of_e4m3<false>(x);
            y[b][word][2 + h] = bf16_of_e4m3<true>(x);
          }
      const char* from = tokens + (pair ? 16 - 2 * static_cast<int>(offset) : 0);  // the other chunk of the two
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + t * kSwizzlePeriod);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) mma_m16n8k16(sum[b][t], y[b][0], x.x, x.y, __nv_bfloat16());
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) mma_m16n8k16(sum[b][t], y[b][1], x.z, x.w, __nv_bfloat16());
      }
    }
  }

  // Sums meet in shared memory as [set][token][row], where rows of tokens of a warp lie in different banks.
  FI_DEVICE int sums_stride() const { return p.blocks * 16 + 4; }
  FI_DEVICE void leave_sums(const Sums& sum) const {
    const Share own = share();
    float* sums = reinterpret_cast<float*>(memory) + own.first * 16 + line();
#pragma unroll
    for (int b = 0; b < kFp8WeightsWarpBlocks; ++b)
      if (b < own.count)
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            sums[(own.set * kTokens + t * 8 + lane % 4 * 2 + e % 2) * sums_stride() + b * 16 + e / 2 * 8] =
                sum[b][t][e];
  }

  // The sums of four rows of b and a token are a quad, of which a tile has so many.
  FI_DEVICE int tile_quads() const { return min(kTokens, p.m - token) * p.blocks * 4; }
  FI_DEVICE float4 sum_of_sets(int quad) const {
    const int of_token = quad / (p.blocks * 4), at = quad - of_token * p.blocks * 4;
    const float* from = reinterpret_cast<const float*>(memory) + of_token * sums_stride() + at * 4;
    float4 x = {};
    const int set = kTokens * sums_stride();
#pragma unroll 1
    for (int s = 0; s < sets(); s += 2, from += 2 * set) {
      const float4 y = *reinterpret_cast<const float4*>(from), z = *reinterpret_cast<const float4*>(from + set);
      x = add(add(x, y), z);
    }
    return x;
  }
  FI_DEVICE static float4 add(float4 x, float4 y) { return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w}; }

  FI_DEVICE void add_sums() const {
#pragma unroll 1
    for (int quad = threadIdx.x; quad < tile_quads(); quad += blockDim.x) store(quad, sum_of_sets(quad));
  }

  // Each CTA of the cluster gets the sums of some quads of all of them. They complete as bytes on its barrier.
  FI_DEVICE void exchange_sums() const {
    auto* partials = reinterpret_cast<float4*>(memory + p.ring_bytes);  // [rank][quad of this CTA]
    const int begin = rank * p.own_quads, mine = max(0, min(p.own_quads, tile_quads() - begin));
    if (threadIdx.x == 0) barriers.partials.arrive_expect(p.splits * mine * static_cast<int>(sizeof(float4)));
#pragma unroll 1
    for (int quad = threadIdx.x; quad < tile_quads(); quad += blockDim.x) {
      const int owner = quad / p.own_quads;
      cluster_send_f32x4(cluster_address(&partials[rank * p.own_quads + quad - owner * p.own_quads], owner),
                         sum_of_sets(quad), cluster_address(&barriers.partials, owner));
    }
    barriers.partials.wait(0);  // by all threads: shared memory ends with the CTA
#pragma unroll 1
    for (int i = threadIdx.x; i < mine; i += blockDim.x) {
      float4 x = {};
#pragma unroll 1
      for (int s = 0; s < p.splits; ++s) x = add(x, partials[s * p.own_quads + i]);
      store(begin + i, x);
    }
  }

  FI_DEVICE void store(int quad, float4 sum) const {
    const int of_token = quad / (p.blocks * 4), column = row + (quad - of_token * p.blocks * 4) * 4;
    float x[] = {sum.x * alpha, sum.y * alpha, sum.z * alpha, sum.w * alpha};
    const int columns = min(4, p.n - column);
    if (columns <= 0) return;
    if (p.bias) {
      const Out* bias = static_cast<const Out*>(p.bias) + column;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] += i < columns ? to_float(bias[i]) : 0.f;
    }
    Out* to = static_cast<Out*>(p.out) + (token + of_token) * p.out_row_stride + column;
    if (p.quads && columns == 4) {
      if constexpr (sizeof(Out) == 2)
        *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair(x[0], x[1], Out()), pack_pair(x[2], x[3], Out()));
      else
        *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < columns) to[i] = from_float<Out>(x[i]);
  }
};

template <class Out, int kTokens>
FI_DEVICE void gemm_fp8_weights(const GemmFp8WeightsParams& p) {
  using Kernel = GemmFp8Weights<Out, kTokens>;
  static_assert(sizeof(typename Kernel::Barriers) <= kFp8WeightsBarrierBytes);
  if (threadIdx.x == 32 * Kernel::kConsumers) prefetch_tensor_map(p.b);
  if (threadIdx.x == 32 * Kernel::kConsumers + 32) prefetch_tensor_map(p.a);
  extern __shared__ uint4 bytes[];
  char* memory = reinterpret_cast<char*>(bytes) + shared_offset<1024>(bytes);
  auto& barriers = *reinterpret_cast<typename Kernel::Barriers*>(memory);
  Kernel(p, memory + kFp8WeightsBarrierBytes, barriers).run();
}

}  // namespace fi
