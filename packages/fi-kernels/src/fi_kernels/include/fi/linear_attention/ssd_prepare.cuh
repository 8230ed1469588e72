// The part of ssd_combined that is parallel over chunks: the decayed scores of C and B, and the factors of tokens.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/linear_attention/chunk_tiles.cuh"
#include "fi/linear_attention/ssd_combined.h"
#include "fi/linear_attention/state_tile.cuh"

namespace fi {

// Loads 64 rows of `width` columns into a tile of kD, the rest 0. kThreads: that take part.
template <int kD, int kThreads, class T>
FI_DEVICE void load_ssd_tile(char* tile, const T* rows, int64_t stride, int count, int width) {
  constexpr int kParts = kD / 8;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(tile));
#pragma unroll 2  // NOTE: with all copies at once kernels of 64 threads spill
  for (int i = 0; i < kChunkTokens * kParts / kThreads; ++i) {
    const int at = threadIdx.x + i * kThreads, row = at / kParts, part = at % kParts;
    const bool exists = row < count && 8 * part < width;
    cp_async_16(to + ChunkTile<kD>::place(row, part), exists ? rows + row * stride + 8 * part : rows, exists);
  }
}

// The chunk with a number: its sequence, its first token, and how many tokens it has; some numbers have none.
struct SsdChunk {
  int64_t token, tokens;

  FI_DEVICE static SsdChunk numbered(const SsdCombinedParams& p, int number) {
    int low = 0, high = p.sequences;  // the last sequence whose first chunk is not above it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (p.first_chunk(middle) <= number)
        low = middle;
      else
        high = middle;
    }
    const int64_t begin = int64_t{number - p.first_chunk(low)} * kChunkTokens, left = p.length_of(low) - begin;
    if (begin < 0 || left <= 0) return {0, 0};
    return {p.begin_of(low) + begin, left < kChunkTokens ? left : kChunkTokens};
  }
};

// A CTA of four warps for a chunk and up to kMostHeads heads of a group. A warp computes a strip of 16 rows of C B^T,
// which all heads share.
template <class T, int kD>
struct SsdPrepare {
  using Tile = ChunkTile<kD>;
  using Matrix = LowerTriangle;
  static constexpr int kThreads = 128, kMostHeads = 8, kBlockRows = 16 * 128;

  struct Shared {
    alignas(128) char b[Tile::kBytes];
    alignas(128) char c[Tile::kBytes];
    alignas(16) float decay[kMostHeads][kChunkTokens];   // sums of d A, in log2
    alignas(16) float column[kMostHeads][kChunkTokens];  // d times the decay from a token to the end of its 16
    alignas(16) float dt[kMostHeads][kChunkTokens];
  };

  const SsdCombinedParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    pdl_wait();
    const int number = divide(blockIdx.x, p.units), unit = blockIdx.x - number * p.units.value;
    const SsdChunk chunk = SsdChunk::numbered(p, number);
    if (chunk.tokens == 0) return pdl_launch_dependents();
    const int head = unit * p.unit_heads, rows = static_cast<int>(chunk.tokens);
    const int64_t g = divide(head, p.group);
    load_ssd_tile<kD, kThreads>(shared.b,
                                static_cast<const T*>(p.b) + chunk.token * p.b_strides[0] + g * p.b_strides[1],
                                p.b_strides[0], rows, p.dstate);
    load_ssd_tile<kD, kThreads>(shared.c,
                                static_cast<const T*>(p.c) + chunk.token * p.c_strides[0] + g * p.c_strides[1],
                                p.c_strides[0], rows, p.dstate);
    cp_async_commit();
    const int64_t matrix = int64_t{number} * p.heads.value + head;  // of the first head
    for (int i = threadIdx.x / 32; i < p.unit_heads; i += kThreads / 32)
      sum_decays(chunk, i, head + i, p.factors + (matrix + i) * kSsdFactors);
    cp_async_wait<0>();
    __syncthreads();

    // The heavy strip is another warp's in other CTAs: warps of one index share a scheduler.
    const int strip = (threadIdx.x / 32 + (blockIdx.x * 0x9E3779B1u >> 30)) % 4;
    char* scores = static_cast<char*>(p.scores) + matrix * Matrix::kBytes;
    if (strip == 0) run_strip<0>(scores);
    if (strip == 1) run_strip<1>(scores);
    if (strip == 2) run_strip<2>(scores);
    if (strip == 3) run_strip<3>(scores);
    pdl_launch_dependents();
  }

 private:
  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }

  // The sums of a head by a scan, two tokens a lane. Tokens that do not exist change nothing.
  FI_DEVICE void sum_decays(const SsdChunk& chunk, int i, int head, float* factors) const {
    constexpr float log2e = 1.4426950408889634f;
    const int t = 2 * lane();
    const float rate = p.a[head * p.a_stride] * log2e;
    const float bias = p.dt_bias.data ? number(p.dt_bias, head * p.dt_bias_stride) : 0.f;
    float dt[2] = {0.f, 0.f}, x[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (t + e < chunk.tokens) {
        dt[e] = number(p.dt, (chunk.token + t + e) * p.dt_strides[0] + head * p.dt_strides[1]) + bias;
        if (p.softplus) dt[e] = softplus(dt[e]);
        dt[e] = fminf(fmaxf(dt[e], p.dt_low), p.dt_high);
      }
      // 2^-128 is as good as 0: sums stay small, and so does the rounding of their differences.
      x[e] = fmaxf(dt[e] * rate, -128.f);
    }
    float sum = x[0] + x[1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane() >= offset) sum += before;
    }
    const float last = __shfl_sync(0xffffffffu, sum, 31), end = __shfl_sync(0xffffffffu, sum, lane() | 7);
    const float2 decay = make_float2(sum - x[1], sum), own = make_float2(dt[0], dt[1]);
    const auto weighted = [&](float to) {
      return make_float2(dt[0] * exp2_approx(to - decay.x), dt[1] * exp2_approx(to - decay.y));
    };
    *reinterpret_cast<float2*>(&shared.decay[i][t]) = decay;
    *reinterpret_cast<float2*>(&shared.column[i][t]) = weighted(end);
    *reinterpret_cast<float2*>(&shared.dt[i][t]) = own;
    const auto put = [&](int which, float2 f) { *reinterpret_cast<float2*>(factors + which * kChunkTokens + t) = f; };
    put(0, decay);
    put(1, make_float2(exp2_approx(decay.x), exp2_approx(decay.y)));
    put(2, weighted(last));
    put(3, own);
  }

  // C B^T of the rows of a strip up to the diagonal, then the scores of each head.
  template <int kStrip>
  FI_DEVICE void run_strip(char* scores) const {
    constexpr int kTiles = 2 * (kStrip + 1);
    float d[kTiles][4] = {};
    const unsigned from_a = address(shared.c) + Tile::place(lane() % 16, lane() / 16) + kStrip * kBlockRows;
    const unsigned from_b = address(shared.b) + Tile::place(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const unsigned swizzle = step % 4 * 32, block = step / 4 * Tile::kBlockBytes;
      unsigned a[4], b[4];
      ldmatrix_x4(a, (from_a ^ swizzle) + block);
#pragma unroll
      for (int pair = 0; pair <= kStrip; ++pair) {
        ldmatrix_x4(b, (from_b ^ swizzle) + block + pair * kBlockRows);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_m16n8k16(d[2 * pair + i], a, b[2 * i], b[2 * i + 1], T());
      }
    }
    for (int i = 0; i < p.unit_heads; ++i, scores += Matrix::kBytes) fill<kStrip>(i, d, scores);
  }
  // Left of the diagonal block, the decay from column to row is the one to the end of the column's block, and that from
  // there: both at most 1, and few for many elements.
  template <int kStrip, int kTiles>
  FI_DEVICE void fill(int i, const float (&d)[kTiles][4], char* scores) const {
    const int row = lane() / 4, own = 16 * kStrip + row;
    const float from[2] = {shared.decay[i][own], shared.decay[i][own + 8]};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int column = 8 * n + 2 * (lane() % 4), place = Matrix::block(kStrip, n / 2) + n % 2 * 128 + 4 * lane();
      const bool diagonal = n / 2 == kStrip;
      const float2 weight =
          *reinterpret_cast<const float2*>(diagonal ? &shared.dt[i][column] : &shared.column[i][column]);
      const float2 to = *reinterpret_cast<const float2*>(&shared.decay[i][column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float low, high;
        if (diagonal) {
          const int at = own + 8 * half;
          low = column <= at ? exp2_approx(from[half] - to.x) * weight.x : 0.f;
          high = column < at ? exp2_approx(from[half] - to.y) * weight.y : 0.f;
        } else {
          const float decay = exp2_approx(from[half] - shared.decay[i][n / 2 * 16 + 15]);
          low = decay * weight.x, high = decay * weight.y;
        }
        *reinterpret_cast<unsigned*>(scores + place + half * 256) =
            pack_pair(low * d[n][2 * half], high * d[n][2 * half + 1], T());
      }
    }
  }
};

template <class T, int kD, int kBytes>
FI_DEVICE void ssd_prepare(const SsdCombinedParams& p) {
  run_in_shared<SsdPrepare<T, kD>, 128, kBytes>(p);
}

}  // namespace fi
