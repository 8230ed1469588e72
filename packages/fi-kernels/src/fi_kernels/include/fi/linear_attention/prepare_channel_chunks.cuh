// The part of chunk_gated_delta_rule that is parallel over chunks, with a gate for each channel of k: T, the decayed
// scores of q and k, and k and q with the decays that the states need.
#pragma once
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/linear_attention/invert_chunk.cuh"

namespace fi {

// A CTA of four warps for a chunk and a head. A decay is the product of the gates that it spans, never a quotient, so
// nothing overflows and gates of 0 are as others: in blocks of 16 x 16 on the diagonal token by token, in the other
// blocks by mma of rows that have the decay from the beginning of their block and columns that have the one to the end
// of theirs (secondary chunking, arXiv:2510.26692); rows also get the decays of the blocks in between.
template <class T, int kD>
struct PrepareChannelChunks {
  using Tile = ChunkTile<kD>;
  using Matrix = LowerTriangle;
  using Inverse = ChunkInverse<T>;
  static constexpr int kThreads = 128, kBlocks = kChunkTokens / 16;
  static constexpr int kBlockRows = 16 * 128;  // bytes of 16 rows of a tile
  // On the diagonal kGroups lanes have 8 channels each of every kSides-th column.
  static constexpr int kGroups = kD / 8, kSides = 32 / kGroups, kOwn = 16 / kSides;

  struct Shared {
    alignas(128) char k[Tile::kBytes];  // in the end with the decay from the beginning of a block
    alignas(128) char q[Tile::kBytes];
    union {
      alignas(16) float g[kChunkTokens][kD];
      struct {
        alignas(128) char columns[Tile::kBytes];  // k with the decay to the end of a block
        typename Inverse::Blocks blocks;
      };
    };
    typename Inverse::Diagonal diagonal;
    alignas(16) char scores[kBlocks][512];  // on the diagonal, as in a LowerTriangle
    alignas(16) float totals[kBlocks][kD];  // the decay of a whole block
    alignas(16) float beta[1][kChunkTokens];
    alignas(16) float inverse[2][kChunkTokens];  // of k and q: 1 / length of rows, or 1; of q times scale
  };

  const ChunkGatedDeltaRuleParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    pdl_wait();
    const int number = divide(blockIdx.x, p.heads), head = blockIdx.x - number * p.heads.value;
    const TokenSpan chunk = TokenSpan::numbered(p, number, kChunkDivisor);
    if (chunk.tokens == 0) return pdl_launch_dependents();
    const int rows = static_cast<int>(chunk.tokens);
    load(shared.k, p.k, p.k_strides, chunk.token, divide(head, p.k_group), rows);
    load(shared.q, p.q, p.q_strides, chunk.token, divide(head, p.q_group), rows);
    load_gates(chunk.token, head, rows);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    measure_rows();
    multiply_gates();
    __syncthreads();

    const int64_t matrix = blockIdx.x;
    char* scores = static_cast<char*>(p.scores) + matrix * Matrix::kBytes;
    // The heavy strip is another warp's in other CTAs: warps of one index share a scheduler.
    const int strip = (threadIdx.x / 32 + (blockIdx.x * 0x9E3779B1u >> 30)) % 4;
    fill_diagonal(strip, scores);
    __syncthreads();
    unsigned columns[kSpan][16];
    decay_rows(static_cast<char*>(p.decayed) + matrix * 3 * Tile::kBytes, columns);
    write_last(p.factors + matrix * kD);
    __syncthreads();  // all gates have been read
    store_columns(columns);
    __syncthreads();
    if (strip == 1) fill<1>(scores);
    if (strip == 2) fill<2>(scores);
    if (strip == 3) fill<3>(scores);
    __syncthreads();
    Inverse{&shared.blocks, &shared.diagonal, shared.beta, 1}.run(
        strip, static_cast<char*>(p.solved) + matrix * Matrix::kBytes);
    pdl_launch_dependents();
  }

 private:
  // A thread decays two channels of kSpan blocks.
  static constexpr int kPairs = kD / 2, kSpan = kBlocks * kPairs / kThreads;

  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static float2 split(unsigned word) {
    Vec<T, 2> pair;
    float f[2];
    memcpy(&pair, &word, sizeof word);
    to_float(pair, f);
    return make_float2(f[0], f[1]);
  }
  FI_DEVICE static float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
  FI_DEVICE static float2 times(float2 a, float b) { return make_float2(a.x * b, a.y * b); }
  FI_DEVICE static unsigned pack(float2 x) { return pack_pair(x.x, x.y, T()); }
  // 8 channels of a row of a tile.
  FI_DEVICE static void load_part(const char* tile, int row, int part, float (&f)[8]) {
    const uint4 words = *reinterpret_cast<const uint4*>(tile + Tile::place(row, part));
    const unsigned own[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = split(own[i]);
      f[2 * i] = x.x, f[2 * i + 1] = x.y;
    }
  }

  FI_DEVICE static void load(char* tile, const void* base, const int64_t (&strides)[2], int64_t token, int head,
                             int rows) {
    const T* first = static_cast<const T*>(base) + token * strides[0] + head * strides[1];
    Tile::template load<kThreads>(address(tile), Tile::template source<kThreads>(first, strides[0]), strides[0], rows);
  }
  // Tokens that do not exist change nothing.
  FI_DEVICE void load_gates(int64_t token, int head, int rows) const {
    constexpr int kParts = kD / 4, kStep = kThreads / kParts;
    const int part = threadIdx.x % kParts;
    const float* from = p.g + token * p.g_strides[0] + head * p.g_strides[1] + 4 * part;
#pragma unroll 4
    for (int row = threadIdx.x / kParts; row < kChunkTokens; row += kStep) {
      if (row < rows)
        cp_async_16(&shared.g[row][4 * part], from + row * p.g_strides[0]);
      else
        *reinterpret_cast<float4*>(&shared.g[row][4 * part]) = make_float4(1.f, 1.f, 1.f, 1.f);
    }
    if (threadIdx.x < kChunkTokens) {
      const int t = threadIdx.x;
      float beta = t < rows ? 1.f : 0.f;
      if (p.beta && t < rows) beta = p.beta[(token + t) * p.beta_strides[0] + head * p.beta_strides[1]];
      shared.beta[0][t] = beta;
    }
  }

  // 1 / length of a row of k or q.
  FI_DEVICE void measure_rows() const {
    const int row = threadIdx.x % kChunkTokens, which = threadIdx.x / kChunkTokens;
    float sum = 0.f;
    if (p.l2norm) {
#pragma unroll 4
      for (int part = 0; part < kGroups; ++part) {
        float x[8];
        load_part(which ? shared.q : shared.k, row, part, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
      }
    }
    shared.inverse[which][row] = (p.l2norm ? rsqrtf(sum + 1e-6f) : 1.f) * (which ? p.scale : 1.f);
  }
  FI_DEVICE float2 gates(int row, int pair) const { return *reinterpret_cast<const float2*>(&shared.g[row][2 * pair]); }
  FI_DEVICE float2 total(int block, int pair) const {
    return *reinterpret_cast<const float2*>(&shared.totals[block][2 * pair]);
  }
  FI_DEVICE void multiply_gates() const {
    const int pair = threadIdx.x % kPairs, first = threadIdx.x / kPairs * kSpan;
#pragma unroll
    for (int block = 0; block < kSpan; ++block) {
      float2 product = make_float2(1.f, 1.f);
#pragma unroll
      for (int i = 0; i < 16; ++i) product = times(product, gates(16 * (first + block) + i, pair));
      *reinterpret_cast<float2*>(&shared.totals[first + block][2 * pair]) = product;
    }
  }

  // The block of A and of the scores on the diagonal, in fp32.
  FI_DEVICE void fill_diagonal(int strip, char* scores) const {
    char* block = shared.scores[strip] + 16 * lane();
    *reinterpret_cast<uint4*>(block) = make_uint4(0, 0, 0, 0);
    __syncwarp();
    float decayed[kOwn][8] = {};
    fill_rows<0>(strip, decayed);
    __syncwarp();
    reinterpret_cast<uint4*>(scores + Matrix::block(strip, strip))[lane()] = *reinterpret_cast<const uint4*>(block);
  }
  // Its rows from kSides * kStep on, kSides of them. decayed: k of the columns of this lane, with the decay up to a
  // row, at its 8 channels. Their sums over lanes are made together, as a transposition.
  template <int kStep>
  FI_DEVICE void fill_rows(int strip, float (&decayed)[kOwn][8]) const {
    constexpr int kSums = 2 * kSides * (kStep + 1), kBatches = (kSums + kGroups - 1) / kGroups;
    const int part = lane() % kGroups, side = lane() / kGroups, first = 16 * strip;
    float sums[kBatches][kGroups] = {};
#pragma unroll
    for (int i = 0; i < kSides; ++i) {
      const int row = first + kSides * kStep + i;
      float k[8], q[8];
      load_part(shared.k, row, part, k);
      load_part(shared.q, row, part, q);
      const float4 low = *reinterpret_cast<const float4*>(&shared.g[row][8 * part]);
      const float4 high = *reinterpret_cast<const float4*>(&shared.g[row][8 * part + 4]);
      const float g[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int m = 0; m <= kStep; ++m) {
        float of_k = 0.f, of_q = 0.f;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          if (m < kStep || i > 0) decayed[m][c] *= g[c];
          if (m == kStep && side == i) decayed[m][c] = k[c];
          of_k += k[c] * decayed[m][c];
          of_q += q[c] * decayed[m][c];
        }
        const int n = (m * kSides + i) * 2;
        sums[n / kGroups][n % kGroups] = of_k;
        sums[n / kGroups][n % kGroups + 1] = of_q;
      }
    }
    store_sums<kStep, 0>(strip, sums);
    if constexpr (kStep + 1 < kOwn) fill_rows<kStep + 1>(strip, decayed);
  }
  template <int kStep, int kBatch, int kBatches>
  FI_DEVICE void store_sums(int strip, float (&sums)[kBatches][kGroups]) const {
    const int n = kBatch * kGroups + lane() % kGroups, row = kSides * kStep + n / 2 % kSides, first = 16 * strip;
    const int column = n / 2 / kSides * kSides + lane() / kGroups;
    const bool of_q = n % 2;
    const float sum = sum_of_lane(sums[kBatch]);
    const float scaled = sum * shared.inverse[of_q][first + row] * shared.inverse[0][first + column % 16];
    if (column <= row) {
      if (of_q)
        *reinterpret_cast<T*>(shared.scores[strip] + (row / 8 * 2 + column / 8) * 128 + row % 8 * 16 + column % 8 * 2) =
            from_float<T>(scaled);
      else
        shared.diagonal.blocks[strip][row * Inverse::kPitch + column] = scaled * shared.beta[0][first + row];
    }
    if constexpr (kBatch + 1 < kBatches) store_sums<kStep, kBatch + 1>(strip, sums);
  }
  // Of 2 * kCount lanes: lane i gets the sum of x[i] over them.
  template <int kCount = kGroups / 2>
  FI_DEVICE static float sum_of_lane(float (&x)[kGroups]) {
    const bool upper = lane() & kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float given = upper ? x[i] : x[i + kCount], kept = upper ? x[i + kCount] : x[i];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, given, kCount);
    }
    if constexpr (kCount > 1)
      return sum_of_lane<kCount / 2>(x);
    else
      return x[0];
  }

  // Replaces k and q by those with the decay from the beginning of a block, and writes k and q with that from the
  // beginning of the chunk and k with that to its end. columns: of k with the decay to the end of a block.
  FI_DEVICE void decay_rows(char* to, unsigned (&columns)[kSpan][16]) const {
    const int pair = threadIdx.x % kPairs, first = threadIdx.x / kPairs * kSpan;
#pragma unroll
    for (int own = 0; own < kSpan; ++own) {
      const int block = first + own;
      float2 before = make_float2(1.f, 1.f), after = before, decay = before;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i < block) before = times(before, total(i, pair));
        if (i > block) after = times(after, total(i, pair));
      }
#pragma unroll
      for (int i = 15; i >= 0; --i) {
        const int row = 16 * block + i, place = word_place(row, pair);
        const float2 k = times(split(*reinterpret_cast<const unsigned*>(shared.k + place)), decay);
        columns[own][i] = pack(k);
        *reinterpret_cast<unsigned*>(to + 2 * Tile::kBytes + place) =
            pack(times(times(k, after), shared.inverse[0][row]));
        decay = times(decay, gates(row, pair));
      }
      decay = make_float2(1.f, 1.f);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * block + i, place = word_place(row, pair);
        decay = times(decay, gates(row, pair));
        decay_word(shared.k + place, to + place, decay, times(before, shared.inverse[0][row]));
        decay_word(shared.q + place, to + Tile::kBytes + place, decay, times(before, shared.inverse[1][row]));
      }
    }
  }
  FI_DEVICE static void decay_word(char* shared, char* global, float2 decay, float2 further) {
    const float2 x = times(split(*reinterpret_cast<const unsigned*>(shared)), decay);
    *reinterpret_cast<unsigned*>(shared) = pack(x);
    *reinterpret_cast<unsigned*>(global) = pack(times(x, further));
  }
  FI_DEVICE static int word_place(int row, int pair) { return Tile::place(row, pair / 4) + pair % 4 * 4; }
  FI_DEVICE void store_columns(const unsigned (&columns)[kSpan][16]) const {
    const int pair = threadIdx.x % kPairs, first = threadIdx.x / kPairs * kSpan;
#pragma unroll
    for (int own = 0; own < kSpan; ++own)
#pragma unroll
      for (int i = 0; i < 16; ++i)
        *reinterpret_cast<unsigned*>(shared.columns + word_place(16 * (first + own) + i, pair)) = columns[own][i];
  }
  // The decay of the chunk.
  FI_DEVICE void write_last(float* to) const {
    if (threadIdx.x >= kD) return;
    float decay = shared.totals[0][threadIdx.x];
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) decay *= shared.totals[block][threadIdx.x];
    to[threadIdx.x] = decay;
  }

  // A and the scores left of the diagonal block of a strip.
  template <int kStrip>
  FI_DEVICE void fill(char* scores) const {
    float kk[2 * kStrip][4] = {}, qk[2 * kStrip][4] = {};
    // Of 16 rows and columns, as operand a and as operand b.
    const unsigned from_a = address(shared.k) + Tile::place(lane() % 16, lane() / 16) + kStrip * kBlockRows;
    const unsigned from_b = address(shared.columns) + Tile::place(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
#pragma unroll 2
    for (int step = 0; step < kD / 16; ++step) {
      const unsigned swizzle = step % 4 * 32, block = step / 4 * Tile::kBlockBytes;
      unsigned k[4], q[4], b[4];
      ldmatrix_x4(k, (from_a ^ swizzle) + block);
      ldmatrix_x4(q, (from_a ^ swizzle) + block + Tile::kBytes);
#pragma unroll
      for (int column = kStrip - 1; column >= 0; --column) {
        if (column < kStrip - 1) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 decay = total(column + 1, 8 * step + 4 * half + lane() % 4);
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              k[i] = pack(times(split(k[i]), decay));
              q[i] = pack(times(split(q[i]), decay));
            }
          }
        }
        ldmatrix_x4(b, (from_b ^ swizzle) + block + column * kBlockRows);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_m16n8k16(kk[2 * column + i], k, b[2 * i], b[2 * i + 1], T());
          mma_m16n8k16(qk[2 * column + i], q, b[2 * i], b[2 * i + 1], T());
        }
      }
    }
    const int row = 16 * kStrip + lane() / 4;
#pragma unroll
    for (int n = 0; n < 2 * kStrip; ++n) {
      const int place = Matrix::block(kStrip, n / 2) + n % 2 * 128 + 4 * lane();
      const float2 to = *reinterpret_cast<const float2*>(&shared.inverse[0][8 * n + 2 * (lane() % 4)]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float of_k = shared.inverse[0][row + 8 * half] * shared.beta[0][row + 8 * half];
        const float of_q = shared.inverse[1][row + 8 * half];
        *reinterpret_cast<unsigned*>(shared.blocks.bytes + place + half * 256) =
            pack_pair(of_k * to.x * kk[n][2 * half], of_k * to.y * kk[n][2 * half + 1], __half());
        *reinterpret_cast<unsigned*>(scores + place + half * 256) =
            pack_pair(of_q * to.x * qk[n][2 * half], of_q * to.y * qk[n][2 * half + 1], T());
      }
    }
  }
};

template <class T, int kD, int kBytes>
FI_DEVICE void prepare_channel_chunks(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<PrepareChannelChunks<T, kD>, 128, kBytes>(p);
}

}  // namespace fi
