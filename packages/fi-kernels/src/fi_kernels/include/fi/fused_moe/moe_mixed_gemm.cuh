// moe_mixed_gemm on sm_80 and later: mma.sync with weights of 4 or 8 bits as its first operand. They go from global
// memory to registers, where they become 16-bit floats; tokens come by way of shared memory.
//
// A lane reads 32 neighbouring weights of two rows in each block of 128 k, and the instructions take k in the order in
// which the lane has them: no weight crosses lanes. Tokens are stored in shared memory in the same order.
#pragma once
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/fused_moe/dequantize_weight.cuh"
#include "fi/gemm/work_tiles.cuh"

namespace fi {

// kTokens of a tile; kRowWarps warps have 16 weight rows each, kKWarps of them take blocks of k in turn.
template <class T, MixedFormat kFormat, int kTokens, int kRowWarps, int kKWarps>
struct MoeMixedGemm {
  static constexpr int kThreads = 32 * kRowWarps * kKWarps, kColumns = 16 * kRowWarps, kBlock = 128;
  static constexpr int kChunkBlocks = kTokens <= 16 ? 4 : 64 / kTokens;         // of k in a stage
  static constexpr int kPitch = kChunkBlocks * 2 * kBlock + 64;                 // bytes of a token
  static constexpr int kWeightVectors = values_per_byte(kFormat) == 2 ? 1 : 2;  // of 16 bytes, 32 weights
  static constexpr int kScales = kFormat == kNvfp4 ? 2 : 1;                     // of 32 weights
  static constexpr int kDepth = kWeightVectors == 1 ? 4 : 2;                    // blocks in flight
  static constexpr int kTokenVectors = kTokens * kChunkBlocks * 16 / kThreads;  // of 8 values, a thread and stage
  static constexpr int kNTiles = kTokens / 8;
  static_assert(kTokens * kChunkBlocks * 16 % kThreads == 0 && kChunkBlocks % kKWarps == 0, "tile");

  struct Shared {
    alignas(16) char x[2][kTokens * kPitch];
    float sums[kKWarps > 1 ? kRowWarps * (kKWarps - 1) * 32 * kNTiles * 4 : 1];
    int tokens[kTokens];
  };
  struct Weights {
    uint4 words[2][kWeightVectors];  // of rows l / 4 and l / 4 + 8
    unsigned scales[2][kScales];
  };

  const MoeMixedGemmParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    pdl_wait();
    GroupTilesOf<kTokens, kColumns, MoeMixedGemmParams> tiles(p);
    GemmTile tile;
    while (tiles.next(tile)) compute(tile);
    pdl_launch_dependents();
  }

 private:
  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int row_warp() { return threadIdx.x / 32 % kRowWarps; }
  FI_DEVICE static int k_warp() { return threadIdx.x / 32 / kRowWarps; }

  // The weights of block t; zeros beyond k, rows beyond n are the last one again.
  FI_DEVICE void load_weights(const GemmTile& tile, int t, Weights& w) const {
    const GemmProblem& q = p.problem;
    const int k = t * kBlock + lane() % 4 * 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(tile.column + row_warp() * 16 + h * 8 + lane() / 4, q.n - 1);
#pragma unroll
      for (int v = 0; v < kWeightVectors; ++v) w.words[h][v] = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int s = 0; s < kScales; ++s) w.scales[h][s] = 0;
      if (k >= q.k) continue;
      const char* from = static_cast<const char*>(q.b) + tile.b_batch * q.b_batch_stride + row * q.b_row_stride;
#pragma unroll
      for (int v = 0; v < kWeightVectors; ++v) w.words[h][v] = load_once(from + k / values_per_byte(kFormat) + 16 * v);
      const int64_t first = tile.b_batch * p.scale_stride;
      const int column = k / scale_block(kFormat);
      if constexpr (kFormat == kInt4) {
        w.scales[h][0] =
            static_cast<const uint16_t*>(p.scales)[first + scale_offset(p.layout, row, column, p.scale_columns)];
      } else {
        const uint8_t* scales =
            static_cast<const uint8_t*>(p.scales) + first + scale_offset(p.layout, row, column, p.scale_columns);
#pragma unroll
        for (int s = 0; s < kScales; ++s) w.scales[h][s] = scales[s];  // neighbours in both layouts
      }
    }
  }

  // Eight values of a token: (0, 4), (1, 5), (2, 6), (3, 7).
  FI_DEVICE void load_tokens(int chunk, uint4 (&x)[kTokenVectors]) const {
    const GemmProblem& q = p.problem;
#pragma unroll
    for (int i = 0; i < kTokenVectors; ++i) {
      const int index = i * kThreads + threadIdx.x, token = index / (16 * kChunkBlocks);
      const int k = (chunk * kChunkBlocks * 16 + index % (16 * kChunkBlocks)) * 8, row = shared.tokens[token];
      x[i] = make_uint4(0, 0, 0, 0);
      if (row >= 0 && k < q.k)
        x[i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(q.a) + row * q.a_row_stride + k);
    }
  }
  // Vector v of the 32 values of quarter u of a block goes to place 4 v + u: lanes of a quarter read 64 bytes together.
  FI_DEVICE void store_tokens(int stage, const uint4 (&x)[kTokenVectors]) const {
#pragma unroll
    for (int i = 0; i < kTokenVectors; ++i) {
      const int index = i * kThreads + threadIdx.x, token = index / (16 * kChunkBlocks);
      const int vector = index % (16 * kChunkBlocks), block = vector / 16, quarter = vector % 16 / 4;
      const int place = block * 16 + vector % 4 * 4 + quarter;
      const uint4 y = {__byte_perm(x[i].x, x[i].z, 0x5410), __byte_perm(x[i].x, x[i].z, 0x7632),
                       __byte_perm(x[i].y, x[i].w, 0x5410), __byte_perm(x[i].y, x[i].w, 0x7632)};
      *reinterpret_cast<uint4*>(shared.x[stage] + token * kPitch + place * 16) = y;
    }
  }

  FI_DEVICE void multiply(const Weights& w, const char* x, float (&d)[kNTiles][4]) const {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      unsigned a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4& own = w.words[h][kWeightVectors == 1 ? 0 : v / 2];
        unsigned words[2];
        if constexpr (kWeightVectors == 1) {
          words[0] = words[1] = v == 0 ? own.x : v == 1 ? own.y : v == 2 ? own.z : own.w;
        } else {
          words[0] = v % 2 ? own.z : own.x;
          words[1] = v % 2 ? own.w : own.y;
        }
        dequantize_weights<kFormat, T>(words, scale_pair<kFormat, T>(w.scales[h][kScales == 1 ? 0 : v / 2]), a[h]);
      }
      const unsigned first[4] = {a[0][0], a[1][0], a[0][1], a[1][1]}, second[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
        const uint4 b = *reinterpret_cast<const uint4*>(x + (8 * j + lane() / 4) * kPitch + (4 * v + lane() % 4) * 16);
        mma_m16n8k16(d[j], first, b.x, b.y, T());
        mma_m16n8k16(d[j], second, b.z, b.w, T());
      }
    }
  }

  FI_DEVICE void compute(const GemmTile& tile) const {
    const int blocks = (p.problem.k + kBlock - 1) / kBlock, chunks = (blocks + kChunkBlocks - 1) / kChunkBlocks;
    __syncthreads();  // the last tile's sums and tokens have been read
    for (int i = threadIdx.x; i < kTokens; i += kThreads)
      shared.tokens[i] = i < tile.rows ? (p.rows ? p.rows[tile.row + i] : tile.row + i) : -1;
    Weights w[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) load_weights(tile, i * kKWarps + k_warp(), w[i]);
    __syncthreads();
    uint4 x[kTokenVectors];
    load_tokens(0, x);
    store_tokens(0, x);
    __syncthreads();
    float d[kNTiles][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const bool more = chunk + 1 < chunks;
      if (more) load_tokens(chunk + 1, x);
#pragma unroll
      for (int i = 0; i < kChunkBlocks / kKWarps; ++i) {
        const int block = i * kKWarps + k_warp(), t = chunk * kChunkBlocks + block;
        multiply(w[0], shared.x[chunk % 2] + block * 256, d);
#pragma unroll
        for (int j = 0; j + 1 < kDepth; ++j) w[j] = w[j + 1];
        load_weights(tile, t + kDepth * kKWarps, w[kDepth - 1]);
      }
      if (more) store_tokens((chunk + 1) % 2, x);
      __syncthreads();
    }
    if constexpr (kKWarps > 1) add_k_warps(d);
    if (k_warp() == 0) store(d, tile);
  }

  FI_DEVICE void add_k_warps(float (&d)[kNTiles][4]) const {
    constexpr int kFloats = kNTiles * 4;
    if (k_warp() > 0) {
      float* to = shared.sums + (((k_warp() - 1) * kRowWarps + row_warp()) * 32) * kFloats + lane();
#pragma unroll
      for (int i = 0; i < kFloats; ++i) to[i * 32] = d[i / 4][i % 4];
    }
    __syncthreads();
    if (k_warp() > 0) return;
#pragma unroll
    for (int w = 1; w < kKWarps; ++w) {
      const float* from = shared.sums + (((w - 1) * kRowWarps + row_warp()) * 32) * kFloats + lane();
#pragma unroll
      for (int i = 0; i < kFloats; ++i) d[i / 4][i % 4] += from[i * 32];
    }
  }

  // Lane l has tokens 2 (l % 4) and the next of each 8, and rows l / 4 and l / 4 + 8.
  FI_DEVICE void store(const float (&d)[kNTiles][4], const GemmTile& tile) const {
    const GemmProblem& q = p.problem;
    const float factor = kSumFactor<kFormat, T> * (p.alpha ? p.alpha[tile.b_batch * p.alpha_stride] : 1.f);
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = 8 * j + lane() % 4 * 2 + e % 2;
        const int column = tile.column + row_warp() * 16 + e / 2 * 8 + lane() / 4;
        if (token < tile.rows && column < q.n)
          static_cast<T*>(q.out)[(tile.row + token) * q.out_row_stride + column] = from_float<T>(d[j][e] * factor);
      }
  }
};

// kBytes: of shared memory that the launch requests.
template <class T, MixedFormat kFormat, int kTokens, int kRowWarps, int kKWarps, int kBytes>
FI_DEVICE void moe_mixed_gemm(const MoeMixedGemmParams& p) {
  run_in_shared<MoeMixedGemm<T, kFormat, kTokens, kRowWarps, kKWarps>, 16, kBytes>(p);
}

}  // namespace fi
