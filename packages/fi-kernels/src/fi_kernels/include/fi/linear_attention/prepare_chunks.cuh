// The part of chunk_gated_delta_rule that is parallel over chunks: for each head T = (I + A)^-1 diag(beta), the decayed
// scores of q and k, and the factors of rows.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/linear_attention/invert_chunk.cuh"

namespace fi {

// A CTA of four warps for a chunk and one, two or four heads of the state that share a head of k and of q. A warp
// computes a strip of 16 rows; the heads go through each phase together, so that a barrier serves all.
template <class T, int kD>
struct PrepareChunks {
  using Tile = ChunkTile<kD>;
  using Matrix = LowerTriangle;
  using Inverse = ChunkInverse<T>;
  static constexpr int kThreads = 128, kMostHeads = 4;
  static constexpr int kBlockRows = 16 * 128;  // bytes of 16 rows of a tile

  struct Tiles {
    alignas(128) char k[Tile::kBytes];
    alignas(128) char q[Tile::kBytes];
  };
  struct Shared {
    union {
      Tiles tiles;
      struct {
        typename Inverse::Blocks heads[kMostHeads];
        typename Inverse::Diagonal diagonals[kMostHeads];
      };
    };
    alignas(16) float inverse_k[kChunkTokens];  // 1 / length of rows, or 1
    alignas(16) float inverse_q[kChunkTokens];
    alignas(16) float decay[kMostHeads][kChunkTokens];   // log2 of the product of g up to a token
    alignas(16) float column[kMostHeads][kChunkTokens];  // decay from a token to the end of its block of 16
    alignas(16) float beta[kMostHeads][kChunkTokens];
  };

  const ChunkGatedDeltaRuleParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    pdl_wait();
    const int number = divide(blockIdx.x, p.units), unit = blockIdx.x - number * p.units.value;
    const TokenSpan chunk = TokenSpan::numbered(p, number, kChunkDivisor);
    if (chunk.tokens == 0) return pdl_launch_dependents();
    const int head = unit * p.unit_heads, rows = static_cast<int>(chunk.tokens);
    load(shared.tiles.k, p.k, p.k_strides, chunk.token, divide(head, p.k_group), rows);
    load(shared.tiles.q, p.q, p.q_strides, chunk.token, divide(head, p.q_group), rows);
    cp_async_commit();
    load_gates(chunk, head);
    cp_async_wait<0>();
    __syncthreads();

    // The heavy strip is another warp's in other CTAs: warps of one index share a scheduler.
    const int strip = (threadIdx.x / 32 + (blockIdx.x * 0x9E3779B1u >> 30)) % 4;
    Scores d;
    if (strip == 0) multiply<0>(d);
    if (strip == 1) multiply<1>(d);
    if (strip == 2) multiply<2>(d);
    if (strip == 3) multiply<3>(d);
    __syncthreads();
    const int64_t matrix = int64_t{blockIdx.x} * p.unit_heads;  // of the first head
    char* scores = static_cast<char*>(p.scores) + matrix * Matrix::kBytes;
    if (strip == 0) fill<0>(d, scores);
    if (strip == 1) fill<1>(d, scores);
    if (strip == 2) fill<2>(d, scores);
    if (strip == 3) fill<3>(d, scores);
    write_factors(p.factors + matrix * 4 * kChunkTokens);
    __syncthreads();
    Inverse{shared.heads, shared.diagonals, shared.beta, p.unit_heads}.run(
        strip, static_cast<char*>(p.solved) + matrix * Matrix::kBytes);
    pdl_launch_dependents();
  }

 private:
  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }

  // Accumulators of a strip of K K^T and Q K^T, in tiles of 8 columns, up to the diagonal. Each strip has code of its
  // own, since registers have no index.
  struct Scores {
    float kk[8][4], qk[8][4];
  };

  FI_DEVICE static void load(char* tile, const void* base, const int64_t (&strides)[2], int64_t token, int head,
                             int rows) {
    const T* first = static_cast<const T*>(base) + token * strides[0] + head * strides[1];
    Tile::template load<kThreads>(address(tile), Tile::template source<kThreads>(first, strides[0]), strides[0], rows);
  }

  // beta, and the sums of log2(g) by a scan, two tokens a lane and a head each warp. Tokens that do not exist change
  // nothing.
  FI_DEVICE void load_gates(const TokenSpan& chunk, int head) const {
    const int own = threadIdx.x / 32, t = 2 * lane();
    if (own >= p.unit_heads) return;
    float gates[2] = {1.f, 1.f}, beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = t + i < chunk.tokens;
      beta[i] = exists ? 1.f : 0.f;
      if (p.g && exists) gates[i] = p.g[(chunk.token + t + i) * p.g_strides[0] + (head + own) * p.g_strides[1]];
      if (p.beta && exists)
        beta[i] = p.beta[(chunk.token + t + i) * p.beta_strides[0] + (head + own) * p.beta_strides[1]];
    }
    *reinterpret_cast<float2*>(&shared.beta[own][t]) = make_float2(beta[0], beta[1]);
    float x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)  // 0 and what is as good as 0: 2^-128 is flushed, -inf - -inf is no number
      x[i] = fmaxf(log2f(gates[i]), -128.f);
    float sum = x[0] + x[1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane() >= offset) sum += before;
    }
    const float last = __shfl_sync(0xffffffffu, sum, lane() | 7);  // of the block
    *reinterpret_cast<float2*>(&shared.decay[own][t]) = make_float2(sum - x[1], sum);
    *reinterpret_cast<float2*>(&shared.column[own][t]) =
        make_float2(exp2_approx(last - (sum - x[1])), exp2_approx(last - sum));
  }

  // Products of the rows of a strip, and 1 / length of those rows, by the diagonals of K K^T and of Q Q^T.
  template <int kStrip>
  FI_DEVICE void multiply(Scores& d) const {
    float qq[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2 * (kStrip + 1); ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) d.kk[n][i] = d.qk[n][i] = 0.f;
    // Of 16 rows and columns, as operand a and as operand b.
    const unsigned tile = address(shared.tiles.k), from_a = tile + Tile::place(lane() % 16, lane() / 16);
    const unsigned from_b = tile + Tile::place(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
#pragma unroll 2  // NOTE: with all steps ptxas moves loads up until registers spill
    for (int step = 0; step < kD / 16; ++step) {
      const unsigned swizzle = step % 4 * 32, block = step / 4 * Tile::kBlockBytes;
      const unsigned at_a = (from_a ^ swizzle) + block + kStrip * kBlockRows, at_b = (from_b ^ swizzle) + block;
      unsigned k[4], q[4], b[4];
      ldmatrix_x4(k, at_a);
      ldmatrix_x4(q, at_a + Tile::kBytes);
#pragma unroll
      for (int pair = 0; pair <= kStrip; ++pair) {
        ldmatrix_x4(b, at_b + pair * kBlockRows);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_m16n8k16(d.kk[2 * pair + i], k, b[2 * i], b[2 * i + 1], T());
          mma_m16n8k16(d.qk[2 * pair + i], q, b[2 * i], b[2 * i + 1], T());
        }
      }
    }
    if (p.l2norm) {
#pragma unroll 2
      for (int step = 0; step < kD / 16; ++step) {
        const unsigned offset = step / 4 * Tile::kBlockBytes + kStrip * kBlockRows + Tile::kBytes;
        unsigned q[4], b[4];
        ldmatrix_x4(q, (from_a ^ step % 4 * 32) + offset);
        ldmatrix_x4(b, (from_b ^ step % 4 * 32) + offset);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_m16n8k16(qq[i], q, b[2 * i], b[2 * i + 1], T());
      }
    }
    const int row = lane() / 4;
    if (lane() % 4 != row / 2) return;  // the lane with rows `row` and `row + 8` of the diagonal
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* k = &d.kk[2 * kStrip + i][2 * i];
      shared.inverse_k[16 * kStrip + 8 * i + row] = inverse_length(row % 2 ? k[1] : k[0]);
      shared.inverse_q[16 * kStrip + 8 * i + row] = inverse_length(row % 2 ? qq[i][2 * i + 1] : qq[i][2 * i]);
    }
  }
  FI_DEVICE float inverse_length(float square) const { return p.l2norm ? rsqrtf(square + 1e-6f) : 1.f; }

  template <int kStrip>
  FI_DEVICE void normalize(Scores& d) const {
    const int row = 16 * kStrip + lane() / 4;
    const float of_k[2] = {shared.inverse_k[row], shared.inverse_k[row + 8]};
    const float of_q[2] = {shared.inverse_q[row] * p.scale, shared.inverse_q[row + 8] * p.scale};
#pragma unroll
    for (int n = 0; n < 2 * (kStrip + 1); ++n) {
      const float2 to = *reinterpret_cast<const float2*>(&shared.inverse_k[8 * n + 2 * (lane() % 4)]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        d.kk[n][2 * half] *= of_k[half] * to.x, d.kk[n][2 * half + 1] *= of_k[half] * to.y;
        d.qk[n][2 * half] *= of_q[half] * to.x, d.qk[n][2 * half + 1] *= of_q[half] * to.y;
      }
    }
  }

  FI_DEVICE void write_factors(float* to) const {
    const int t = threadIdx.x % kChunkTokens;
    for (int i = threadIdx.x / kChunkTokens; i < p.unit_heads; i += kThreads / kChunkTokens) write_factors_of(i, t, to);
  }
  FI_DEVICE void write_factors_of(int i, int t, float* to) const {
    to += i * 4 * kChunkTokens + t;
    const float decay = shared.decay[i][t], last = shared.decay[i][kChunkTokens - 1], own = exp2_approx(decay);
    to[0] = own * shared.inverse_k[t];
    to[kChunkTokens] = own * shared.inverse_q[t] * p.scale;
    to[2 * kChunkTokens] = exp2_approx(last - decay) * shared.inverse_k[t];
    to[3 * kChunkTokens] = exp2_approx(last);
  }

  // A to shared memory, the scores to global memory. Left of the diagonal block, the decay from column to row is the
  // one to the end of the column's block, and that from there: both at most 1, and few for many elements.
  template <int kStrip>
  FI_DEVICE void fill(Scores& d, char* scores) const {
    normalize<kStrip>(d);
    for (int i = 0; i < p.unit_heads; ++i, scores += Matrix::kBytes) fill_head<kStrip>(i, d, scores);
  }
  template <int kStrip>
  FI_DEVICE void fill_head(int i, const Scores& d, char* scores) const {
    char* blocks = shared.heads[i].bytes;
    const int row = lane() / 4, own = 16 * kStrip + row;
    const float from[2] = {shared.decay[i][own], shared.decay[i][own + 8]};
    const float beta[2] = {shared.beta[i][own], shared.beta[i][own + 8]};
#pragma unroll
    for (int n = 0; n < 2 * (kStrip + 1); ++n) {
      const int column = 8 * n + 2 * (lane() % 4), place = Matrix::block(kStrip, n / 2) + n % 2 * 128 + 4 * lane();
      const bool diagonal = n / 2 == kStrip;
      const float2 to =
          *reinterpret_cast<const float2*>(diagonal ? &shared.decay[i][column] : &shared.column[i][column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* kk = &d.kk[n][2 * half];
        const float* qk = &d.qk[n][2 * half];
        float low, high;
        float2 a = make_float2(beta[half] * kk[0], beta[half] * kk[1]);
        if (diagonal) {
          const int at = own + 8 * half;
          low = column <= at ? exp2_approx(from[half] - to.x) : 0.f;
          high = column < at ? exp2_approx(from[half] - to.y) : 0.f;
          a.x = column < at ? a.x * low : 0.f;
          a.y = column + 1 < at ? a.y * high : 0.f;
          *reinterpret_cast<float2*>(
              &shared.diagonals[i].blocks[kStrip][(row + 8 * half) * Inverse::kPitch + column % 16]) = a;
        } else {
          const float decay = exp2_approx(from[half] - shared.decay[i][n / 2 * 16 + 15]);
          low = decay * to.x, high = decay * to.y;
          *reinterpret_cast<unsigned*>(blocks + place + half * 256) = pack_pair(a.x * low, a.y * high, __half());
        }
        *reinterpret_cast<unsigned*>(scores + place + half * 256) = pack_pair(low * qk[0], high * qk[1], T());
      }
    }
  }
};

template <class T, int kD, int kBytes>
FI_DEVICE void prepare_chunks(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<PrepareChunks<T, kD>, 128, kBytes>(p);
}

}  // namespace fi
