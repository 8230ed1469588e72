// The part of chunk_gated_delta_rule that is parallel over chunks: for each head T = (I + A)^-1 diag(beta), the decayed
// scores of q and k, and the factors of rows.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/linear_attention/chunk_tiles.cuh"

namespace fi {

// A CTA of four warps for a chunk and a head of k, which several heads of the state may share.
template <class T, int kD>
struct PrepareChunks {
  using Tile = ChunkTile<kD>;
  using Matrix = LowerTriangle;
  static constexpr int kThreads = 128, kPitch = kChunkTokens + 4;

  struct Shared {
    alignas(128) char k[Tile::kBytes];
    alignas(128) char q[Tile::kBytes];
    alignas(16) float a[kChunkTokens][kPitch];  // A below the diagonal; then (I + A)^-1, without blocks above it
    alignas(16) float inverse_k[kChunkTokens];  // 1 / length of rows, or 1
    alignas(16) float inverse_q[kChunkTokens];
    alignas(16) float decay[kChunkTokens];  // log2 of the product of g up to a token
    alignas(16) float beta[kChunkTokens];
  };

  const ChunkGatedDeltaRuleParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    pdl_wait();
    const int number = divide(blockIdx.x, p.k_heads), k_head = blockIdx.x - number * p.k_heads.value;
    const TokenSpan chunk = TokenSpan::numbered(p, number, kChunkTokens);
    if (chunk.tokens == 0) return pdl_launch_dependents();
    const int group = p.k_group.value;
    const T* k = static_cast<const T*>(p.k) + chunk.token * p.k_strides[0] + k_head * p.k_strides[1];
    Tile::template load<kThreads>(address(shared.k), k, p.k_strides[0], static_cast<int>(chunk.tokens));
    float kk[8][4] = {}, qk[8][4] = {};
    int q_head = -1;
    for (int h = k_head * group; h < (k_head + 1) * group; ++h) {
      const int own = divide(h, p.q_group);
      __syncthreads();  // the tiles and matrices of the head before have been read
      if (own != q_head) {
        const T* q = static_cast<const T*>(p.q) + chunk.token * p.q_strides[0] + own * p.q_strides[1];
        Tile::template load<kThreads>(address(shared.q), q, p.q_strides[0], static_cast<int>(chunk.tokens));
      }
      cp_async_commit();
      load_gates(chunk, h);
      cp_async_wait<0>();
      __syncthreads();
      if (own != q_head) {
        if (q_head < 0) multiply(kk, shared.k);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) qk[n][i] = 0.f;
        multiply(qk, shared.q);
        lengths();
        q_head = own;
        __syncthreads();
      }
      const int64_t matrix = int64_t{number} * p.heads + h;
      write_factors(p.factors + matrix * 4 * kChunkTokens);
      fill(kk, qk, static_cast<char*>(p.scores) + matrix * Matrix::kBytes);
      __syncthreads();
      invert();
      write_solved(static_cast<char*>(p.solved) + matrix * Matrix::kBytes);
    }
    pdl_launch_dependents();
  }

 private:
  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }

  // beta, and the sums of log2(g) by a scan of one warp, two tokens a lane. Tokens that do not exist change nothing.
  FI_DEVICE void load_gates(const TokenSpan& chunk, int h) const {
    if (threadIdx.x < 32) {
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = 2 * threadIdx.x + i;
        const float g = p.g && t < chunk.tokens ? p.g[(chunk.token + t) * p.g_strides[0] + h * p.g_strides[1]] : 1.f;
        const float log = log2f(g);
        x[i] = log < -128.f ? -128.f : log;  // 0 and what is as good as 0: 2^-128 is flushed, -inf - -inf is no number
      }
      float sum = x[0] + x[1];
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float before = __shfl_up_sync(0xffffffffu, sum, offset);
        if (static_cast<int>(threadIdx.x) >= offset) sum += before;
      }
      shared.decay[2 * threadIdx.x] = sum - x[1];
      shared.decay[2 * threadIdx.x + 1] = sum;
    } else if (threadIdx.x < 32 + kChunkTokens) {
      const int t = threadIdx.x - 32;
      float beta = t < chunk.tokens;
      if (p.beta && t < chunk.tokens) beta = p.beta[(chunk.token + t) * p.beta_strides[0] + h * p.beta_strides[1]];
      shared.beta[t] = beta;
    }
  }

  // d += rows of a warp times k^T, columns up to the diagonal.
  FI_DEVICE void multiply(float (&d)[8][4], const char* rows) const {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      unsigned a[4];
      Tile::a_fragment(a, address(rows), 16 * warp, step);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        if (pair > warp) continue;
        unsigned b[4];
        Tile::b_fragment(b, address(shared.k), pair, step);
        mma_m16n8k16(d[2 * pair], a, b[0], b[1], T());
        mma_m16n8k16(d[2 * pair + 1], a, b[2], b[3], T());
      }
    }
  }

  // 1 / length of each row, by two threads.
  FI_DEVICE void lengths() const {
    const int row = threadIdx.x / 2;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const char* tile = which ? shared.q : shared.k;
      float sum = 0.f;
      for (int part = threadIdx.x % 2; p.l2norm && part < Tile::kParts; part += 2) {
        float x[8];
        to_float(fi::load<T, 8>(reinterpret_cast<const T*>(tile + Tile::place(row, part))), x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
      }
      sum = warp_sum(sum, 2);
      (which ? shared.inverse_q : shared.inverse_k)[row] = p.l2norm ? rsqrtf(sum + 1e-6f) : 1.f;
    }
  }

  FI_DEVICE void write_factors(float* to) const {
    if (threadIdx.x >= kChunkTokens) return;
    const int t = threadIdx.x;
    const float decay = shared.decay[t], last = shared.decay[kChunkTokens - 1];
    to[t] = exp2_approx(decay) * shared.inverse_k[t];
    to[kChunkTokens + t] = exp2_approx(decay) * shared.inverse_q[t] * p.scale;
    to[2 * kChunkTokens + t] = exp2_approx(last - decay) * shared.inverse_k[t];
    to[3 * kChunkTokens + t] = exp2_approx(last);
  }

  // A to shared memory, the scores to global memory.
  FI_DEVICE void fill(const float (&kk)[8][4], const float (&qk)[8][4], char* scores) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp + 8 * half + lane / 4;
      const float of_k = shared.inverse_k[row] * shared.beta[row], of_q = shared.inverse_q[row] * p.scale;
      const float from = shared.decay[row];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (n / 2 > warp) continue;  // above the diagonal
        const int column = 8 * n + 2 * (lane % 4);
        const float2 to = *reinterpret_cast<const float2*>(&shared.decay[column]);
        const float2 length = *reinterpret_cast<const float2*>(&shared.inverse_k[column]);
        const float low = column <= row ? exp2_approx(from - to.x) * length.x : 0.f;
        const float high = column < row ? exp2_approx(from - to.y) * length.y : 0.f;
        const float own = column < row ? of_k * low * kk[n][2 * half] : 0.f;
        const float next = column + 1 < row ? of_k * high * kk[n][2 * half + 1] : 0.f;
        *reinterpret_cast<float2*>(&shared.a[row][column]) = make_float2(own, next);
        *reinterpret_cast<unsigned*>(scores + Matrix::place(row, n) + 4 * (lane % 4)) =
            pack_pair(of_q * low * qk[n][2 * half], of_q * high * qk[n][2 * half + 1], T());
      }
    }
  }

  // (I + A)^-1: diagonal blocks of 16 by forward substitution in fp32, then two levels of
  // [X 0; B Y]^-1 = [X^-1 0; -Y^-1 B X^-1  Y^-1] by mma in tf32.
  FI_DEVICE void invert() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane < 16) {
      const int begin = 16 * warp;
      float x[16];
#pragma unroll
      for (int row = 0; row < 16; ++row) {
        float sum = row == lane ? 1.f : 0.f;
#pragma unroll
        for (int j = 0; j < row; j += 4) {
          const float4 a = *reinterpret_cast<const float4*>(&shared.a[begin + row][begin + j]);
          sum -= a.x * x[j];
          if (j + 1 < row) sum -= a.y * x[j + 1];
          if (j + 2 < row) sum -= a.z * x[j + 2];
          if (j + 3 < row) sum -= a.w * x[j + 3];
        }
        x[row] = sum;
      }
      __syncwarp(0xffffu);
#pragma unroll
      for (int row = 0; row < 16; ++row) shared.a[begin + row][begin + lane] = x[row];
    }
    __syncthreads();
    float block[2][4];
    if (warp % 2 == 0) merge<16>(16 * warp, 0, 0, block);
    __syncthreads();
    if (warp % 2 == 0) store_block(16 * warp + 16, 16 * warp, block);
    __syncthreads();
    merge<32>(0, warp / 2, warp % 2, block);
    __syncthreads();
    store_block(32 + 16 * (warp / 2), 16 * (warp % 2), block);
    __syncthreads();
  }

  // Block (m, n) of 16 x 16 of Y^-1 B X^-1 by a warp, where X and Y have kSize rows and X begins at row `begin`.
  template <int kSize>
  FI_DEVICE void merge(int begin, int m, int n, float (&d)[2][4]) const {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4, middle = begin + kSize;
    const auto at = [&](int r, int c) { return tf32(shared.a[r][c]); };
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
  FI_DEVICE void store_block(int first_row, int first_column, const float (&d)[2][4]) const {
    const int row = first_row + threadIdx.x % 32 / 4, column = first_column + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(&shared.a[row][column + 8 * i]) = make_float2(-d[i][0], -d[i][1]);
      *reinterpret_cast<float2*>(&shared.a[row + 8][column + 8 * i]) = make_float2(-d[i][2], -d[i][3]);
    }
  }

  // T, in the type of q.
  FI_DEVICE void write_solved(char* to) const {
    const int row = threadIdx.x / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int part = threadIdx.x % 2 + 2 * i;
      if (i > row / 16) break;
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const float4 a = *reinterpret_cast<const float4*>(&shared.a[row][8 * part + e]);
        const float4 beta = *reinterpret_cast<const float4*>(&shared.beta[8 * part + e]);
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
