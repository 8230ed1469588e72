// The part of chunk_gated_delta_rule that is parallel over chunks: for each head T = (I + A)^-1 diag(beta), the decayed
// scores of q and k, and the factors of rows.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/linear_attention/chunk_tiles.cuh"

namespace fi {

// A CTA of four warps for a chunk and one or two heads of the state that share a head of k and of q. A warp computes a
// strip of 16 rows; two heads go through each phase together, so that a barrier serves both.
template <class T, int kD>
struct PrepareChunks {
  using Tile = ChunkTile<kD>;
  using Matrix = LowerTriangle;
  static constexpr int kThreads = 128, kPair = 2;
  // A of a head: blocks of 16 x 16 in the order of LowerTriangle. Rows of 20 floats put the operands of mma in distinct
  // banks, and 16 floats more those of the two heads.
  static constexpr int kPitch = 20, kBlock = 16 * kPitch, kHead = 10 * kBlock + 16;

  struct Tiles {
    alignas(128) char k[Tile::kBytes];
    alignas(128) char q[Tile::kBytes];
  };
  struct Shared {
    union {
      Tiles tiles;
      alignas(128) float a[kPair][kHead];  // A below the diagonal; then (I + A)^-1
    };
    alignas(16) float inverse_k[kChunkTokens];  // 1 / length of rows, or 1
    alignas(16) float inverse_q[kChunkTokens];
    alignas(16) float decay[kPair][kChunkTokens];   // log2 of the product of g up to a token
    alignas(16) float column[kPair][kChunkTokens];  // decay from a token to the end of its block of 16
    alignas(16) float beta[kPair][kChunkTokens];
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
    float kk[8][4] = {}, qk[8][4] = {};
    multiply(kk, shared.tiles.k, strip);
    lengths(kk, strip);
    multiply(qk, shared.tiles.q, strip);
    __syncthreads();
    normalize(kk, qk, strip);
    const int64_t matrix = int64_t{number} * p.heads.value + head;
    write_factors(p.factors + matrix * 4 * kChunkTokens);
    for (int i = 0; i < p.unit_heads; ++i)
      fill(i, strip, kk, qk, static_cast<char*>(p.scores) + (matrix + i) * Matrix::kBytes);
    __syncthreads();
    invert();
    for (int i = 0; i < p.unit_heads; ++i)
      write_solved(i, strip, static_cast<char*>(p.solved) + (matrix + i) * Matrix::kBytes);
    pdl_launch_dependents();
  }

 private:
  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }

  FI_DEVICE static void load(char* tile, const void* base, const int64_t (&strides)[2], int64_t token, int head,
                             int rows) {
    Tile::template load<kThreads>(address(tile), static_cast<const T*>(base) + token * strides[0] + head * strides[1],
                                  strides[0], rows);
  }

  // beta, and the sums of log2(g) by a scan, two tokens a lane: warps 0 and 1 have g of the two heads, warps 2 and 3
  // beta. Tokens that do not exist change nothing.
  FI_DEVICE void load_gates(const TokenSpan& chunk, int head) const {
    const int warp = threadIdx.x / 32, own = warp % 2, t = 2 * lane();
    if (own >= p.unit_heads) return;
    const float* from = warp < 2 ? p.g : p.beta;
    const int64_t* strides = warp < 2 ? p.g_strides : p.beta_strides;
    float gates[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = t + i < chunk.tokens;
      gates[i] = warp < 2 || exists ? 1.f : 0.f;
      if (from && exists) gates[i] = from[(chunk.token + t + i) * strides[0] + (head + own) * strides[1]];
    }
    if (warp >= 2) {
      *reinterpret_cast<float2*>(&shared.beta[own][t]) = make_float2(gates[0], gates[1]);
      return;
    }
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

  // d = rows of a strip times k^T, columns up to the diagonal.
  FI_DEVICE void multiply(float (&d)[8][4], const char* rows, int strip) const {
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      unsigned a[4];
      Tile::a_fragment(a, address(rows), 16 * strip, step);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        if (pair > strip) continue;
        unsigned b[4];
        Tile::b_fragment(b, address(shared.tiles.k), pair, step);
        mma_m16n8k16(d[2 * pair], a, b[0], b[1], T());
        mma_m16n8k16(d[2 * pair + 1], a, b[2], b[3], T());
      }
    }
  }

  // 1 / length of the rows of a strip: the diagonals of K K^T and of Q Q^T.
  FI_DEVICE void lengths(const float (&kk)[8][4], int strip) const {
    float k[2][4] = {}, q[2][4] = {};
    if (p.l2norm) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (n / 2 == strip) k[n % 2][i] = kk[n][i];
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
        unsigned a[4], b[4];
        Tile::a_fragment(a, address(shared.tiles.q), 16 * strip, step);
        Tile::b_fragment(b, address(shared.tiles.q), strip, step);
        mma_m16n8k16(q[0], a, b[0], b[1], T());
        mma_m16n8k16(q[1], a, b[2], b[3], T());
      }
    }
    const int row = lane() / 4;
    if (lane() % 4 != row / 2) return;  // the lane with rows `row` and `row + 8` of the diagonal
    const auto inverse = [&](const float (&d)[2][4], int i) {
      const float square = row % 2 ? d[i][2 * i + 1] : d[i][2 * i];
      return p.l2norm ? rsqrtf(square + 1e-6f) : 1.f;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.inverse_k[16 * strip + 8 * i + row] = inverse(k, i);
      shared.inverse_q[16 * strip + 8 * i + row] = inverse(q, i);
    }
  }
  FI_DEVICE void normalize(float (&kk)[8][4], float (&qk)[8][4], int strip) const {
    const int row = 16 * strip + lane() / 4;
    const float of_k[2] = {shared.inverse_k[row], shared.inverse_k[row + 8]};
    const float of_q[2] = {shared.inverse_q[row] * p.scale, shared.inverse_q[row + 8] * p.scale};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n / 2 > strip) continue;
      const float2 to = *reinterpret_cast<const float2*>(&shared.inverse_k[8 * n + 2 * (lane() % 4)]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        kk[n][2 * half] *= of_k[half] * to.x, kk[n][2 * half + 1] *= of_k[half] * to.y;
        qk[n][2 * half] *= of_q[half] * to.x, qk[n][2 * half + 1] *= of_q[half] * to.y;
      }
    }
  }

  FI_DEVICE void write_factors(float* to) const {
    const int t = threadIdx.x % kChunkTokens, i = threadIdx.x / kChunkTokens;
    if (i >= p.unit_heads) return;
    to += i * 4 * kChunkTokens + t;
    const float decay = shared.decay[i][t], last = shared.decay[i][kChunkTokens - 1], own = exp2_approx(decay);
    to[0] = own * shared.inverse_k[t];
    to[kChunkTokens] = own * shared.inverse_q[t] * p.scale;
    to[2 * kChunkTokens] = exp2_approx(last - decay) * shared.inverse_k[t];
    to[3 * kChunkTokens] = exp2_approx(last);
  }

  // Of A of head i of the pair.
  FI_DEVICE static constexpr int block_of(int row, int column) {
    return (column * (9 - column) / 2 + row - column) * kBlock;
  }
  FI_DEVICE static int place_of(int row, int column) {
    return block_of(row / 16, column / 16) + row % 16 * kPitch + column % 16;
  }

  // A to shared memory, the scores to global memory. Left of the diagonal block, the decay from column to row is the
  // one to the end of the column's block, and that from there: both at most 1, and few for many elements.
  FI_DEVICE void fill(int i, int strip, const float (&kk)[8][4], const float (&qk)[8][4], char* scores) const {
    const int row = lane() / 4, own = 16 * strip + row;
    const float from[2] = {shared.decay[i][own], shared.decay[i][own + 8]};
    const float beta[2] = {shared.beta[i][own], shared.beta[i][own + 8]};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > strip) break;
      const bool diagonal = block == strip;
      float decay[2] = {1.f, 1.f};
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (!diagonal) decay[half] = exp2_approx(from[half] - shared.decay[i][16 * block + 15]);
#pragma unroll
      for (int n = 2 * block; n < 2 * block + 2; ++n) {
        const int column = 8 * n + 2 * (lane() % 4);
        float* a = shared.a[i] + block_of(strip, block) + row * kPitch + column % 16;
        char* score = scores + Matrix::block(strip, block) + n % 2 * 128 + 4 * lane();
        const float2 to =
            *reinterpret_cast<const float2*>(diagonal ? &shared.decay[i][column] : &shared.column[i][column]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float low = decay[half] * to.x, high = decay[half] * to.y;
          float2 of_a = make_float2(beta[half] * kk[n][2 * half], beta[half] * kk[n][2 * half + 1]);
          if (diagonal) {
            const int at = own + 8 * half;
            low = column <= at ? exp2_approx(from[half] - to.x) : 0.f;
            high = column < at ? exp2_approx(from[half] - to.y) : 0.f;
            if (column >= at) of_a.x = 0.f;
            if (column + 1 >= at) of_a.y = 0.f;
          }
          *reinterpret_cast<float2*>(a + 8 * half * kPitch) = make_float2(of_a.x * low, of_a.y * high);
          *reinterpret_cast<unsigned*>(score + half * 256) =
              pack_pair(low * qk[n][2 * half], high * qk[n][2 * half + 1], T());
        }
      }
    }
  }

  // (I + A)^-1: diagonal blocks of 16 by forward substitution in fp32, then two levels of
  // [X 0; B Y]^-1 = [X^-1 0; -Y^-1 B X^-1  Y^-1] by mma in tf32. Warps 0 and 1 have the upper and the lower half of the
  // first head, until both halves meet.
  FI_DEVICE void invert() const {
    const int warp = threadIdx.x / 32, half = warp % 2;
    if (warp / 2 < p.unit_heads) {
      float* a = shared.a[warp / 2];
      substitute(a + block_of(2 * half + lane() / 16, 2 * half + lane() / 16));
      __syncwarp();
      float block[2][4];
      merge<16>(a, 32 * half, 0, 0, block);
      __syncwarp();
      store_block(a + block_of(2 * half + 1, 2 * half), block);
    }
    __syncthreads();
    float blocks[kPair][2][4];
#pragma unroll
    for (int i = 0; i < kPair; ++i)
      if (i < p.unit_heads) merge<32>(shared.a[i], 0, warp / 2, half, blocks[i]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPair; ++i)
      if (i < p.unit_heads) store_block(shared.a[i] + block_of(2 + warp / 2, half), blocks[i]);
    __syncthreads();
  }
  // A lane has a column of the inverse of a diagonal block, 16 lanes each of two blocks.
  FI_DEVICE static void substitute(float* block) {
    const int column = lane() % 16;
    float x[16];
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      float sum = row == column ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < row; j += 4) {
        const float4 a = *reinterpret_cast<const float4*>(block + row * kPitch + j);
        sum -= a.x * x[j];
        if (j + 1 < row) sum -= a.y * x[j + 1];
        if (j + 2 < row) sum -= a.z * x[j + 2];
        if (j + 3 < row) sum -= a.w * x[j + 3];
      }
      x[row] = sum;
    }
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 16; ++row) block[row * kPitch + column] = x[row];
  }

  // Block (m, n) of 16 x 16 of Y^-1 B X^-1 by a warp, where X and Y have kSize rows and X begins at row `begin`.
  template <int kSize>
  FI_DEVICE static void merge(const float* matrix, int begin, int m, int n, float (&d)[2][4]) {
    const int row = lane() / 4, column = lane() % 4, middle = begin + kSize;
    const auto at = [&](int r, int c) { return tf32(matrix[place_of(r, c)]); };
    float product[kSize / 8][4] = {};  // of Y^-1 and B, at the columns that are not above the diagonal of X^-1
#pragma unroll
    for (int k = 0; k < kSize; k += 8) {
      if (k >= 16 * (m + 1)) continue;
      const int r = middle + 16 * m + row, c = middle + k + column;
      const unsigned a[4] = {at(r, c), at(r + 8, c), at(r, c + 4), at(r + 8, c + 4)};
#pragma unroll
      for (int j = 0; j < kSize / 8; ++j)
        if (j >= 2 * n)
          mma_m16n8k8_tf32(product[j], a, at(middle + k + column, begin + 8 * j + row),
                           at(middle + k + column + 4, begin + 8 * j + row));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) d[i][0] = d[i][1] = d[i][2] = d[i][3] = 0.f;
    // The accumulators become operand a: its columns c and c + 4 are columns 2 c and 2 c + 1 of the product.
#pragma unroll
    for (int j = 0; j < kSize / 8; ++j) {
      if (j < 2 * n) continue;
      const unsigned a[4] = {tf32(product[j][0]), tf32(product[j][2]), tf32(product[j][1]), tf32(product[j][3])};
      const int k = begin + 8 * j + 2 * column;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = begin + 16 * n + 8 * i + row;
        mma_m16n8k8_tf32(d[i], a, at(k, c), at(k + 1, c));
      }
    }
  }
  FI_DEVICE static void store_block(float* block, const float (&d)[2][4]) {
    float* at = block + lane() / 4 * kPitch + 2 * (lane() % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(at + 8 * i) = make_float2(-d[i][0], -d[i][1]);
      *reinterpret_cast<float2*>(at + 8 * kPitch + 8 * i) = make_float2(-d[i][2], -d[i][3]);
    }
  }

  // T of head i of the pair, in the type of q.
  FI_DEVICE void write_solved(int i, int strip, char* to) const {
    const int row = 16 * strip + lane() / 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int part = lane() % 2 + 2 * j;
      if (j > strip) break;
      const float* from = shared.a[i] + place_of(row, 8 * part);
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const float4 a = *reinterpret_cast<const float4*>(from + e);
        const float4 beta = *reinterpret_cast<const float4*>(&shared.beta[i][8 * part + e]);
        x[e] = a.x * beta.x, x[e + 1] = a.y * beta.y, x[e + 2] = a.z * beta.z, x[e + 3] = a.w * beta.w;
      }
      Vec<T, 8> words;
      from_float(x, words);
      store(reinterpret_cast<T*>(to + Matrix::place(row, part)), words);
    }
  }
};

template <class T, int kD, int kBytes>
FI_DEVICE void prepare_chunks(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<PrepareChunks<T, kD>, 128, kBytes>(p);
}

}  // namespace fi
