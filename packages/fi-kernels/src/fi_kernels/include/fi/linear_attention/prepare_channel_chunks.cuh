// The part of chunk_gated_delta_rule that is parallel over chunks, with a gate for each channel of k: T, the decayed
// scores of q and k, and k and q with the decays that the states need.
#pragma once
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/linear_attention/invert_chunk.cuh"

namespace fi {

// A CTA of four warps for a chunk and a head. A warp has a strip of 16 rows and decays it, a lane kOwn channels of all
// rows, so gates stay in registers. All products are by mma, of rows that have the decay from a boundary on and columns
// that have the one up to it (secondary chunking, arXiv:2510.26692). A decay is the product of the gates that it spans,
// never a quotient, so nothing overflows and gates of 0 are as others. Boundaries are those of strips and, within a
// strip, those of 8, 4, 2 and 1 rows: a level has the products of the upper with the lower of two neighbouring
// segments.
template <class T, int kD>
struct PrepareChannelChunks {
  using Tile = ChunkTile<kD>;
  using Matrix = LowerTriangle;
  using Inverse = ChunkInverse<T>;
  static constexpr int kThreads = 128, kStrips = kChunkTokens / 16;
  static constexpr int kOwn = kD / 32;          // channels of a lane
  static constexpr int kStripBytes = 16 * 128;  // from a strip of a tile to the next

  // kRows rows, a multiple of 8, swizzled as those of a ChunkTile.
  template <int kRows>
  struct Rows {
    static constexpr int kBlockBytes = kRows * 128, kBytes = kRows * 2 * kD;
    FI_DEVICE static int place(int row, int part) {
      return part / 8 * kBlockBytes + row * 128 + ((part % 8 ^ row % 8) << 4);
    }
  };
  using Level = Rows<24>;  // of the upper segments 8 rows of k, then of q; of the lower ones 8 rows of k
  using Columns = Rows<16>;

  struct Shared {
    alignas(128) char k[Tile::kBytes];  // in the end with the decay from the beginning of a strip
    alignas(128) char q[Tile::kBytes];
    union {
      alignas(128) char levels[kStrips][Level::kBytes];
      // Of two strips: k of the earlier with the decay to the beginning of the later.
      alignas(128) char columns[kStrips * (kStrips - 1) / 2][Columns::kBytes];
    };
    typename Inverse::Blocks blocks;
    typename Inverse::Diagonal diagonal;
    alignas(16) char scores[kStrips][512];  // on the diagonal, as in a LowerTriangle
    alignas(16) float totals[kStrips][kD];  // the decay of a whole strip
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
    cp_async_commit();
    // The heavy strip is another warp's in other CTAs: warps of one index share a scheduler.
    const int strip = (threadIdx.x / 32 + (blockIdx.x * 0x9E3779B1u >> 30)) % 4;
    int channel = kOwn * lane();
    Own gates[16];
    load_gates(gates, chunk.token, head, strip, rows);
    cp_async_wait<0>();
    __syncthreads();

    const int64_t matrix = blockIdx.x;
    char* scores = static_cast<char*>(p.scores) + matrix * Matrix::kBytes;
    fill_diagonal(strip, channel, gates, scores);
    __syncthreads();                   // levels have been read, totals are there
    asm volatile("" : "+r"(channel));  // NOTE: else addresses of the levels are kept, and spill
    char* decayed = static_cast<char*>(p.decayed) + matrix * 3 * Tile::kBytes;
    decay_columns(strip, channel, gates, decayed + 2 * Tile::kBytes);
    decay_rows(strip, channel, gates, decayed);
    write_last(p.factors + matrix * kD);
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
  // The channels of a lane, in a row.
  struct alignas(4 * kOwn) Own {
    float x[kOwn];

    FI_DEVICE static Own ones() {
      Own own;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own.x[i] = 1.f;
      return own;
    }
    FI_DEVICE static Own of(Vec<T, kOwn> elements) {  // by value: of what lies in memory, memcpy loads bytes
      Own own;
      to_float(elements, own.x);
      return own;
    }
    FI_DEVICE Own operator*(const Own& other) const {
      Own own;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own.x[i] = x[i] * other.x[i];
      return own;
    }
    FI_DEVICE Own operator*(float factor) const {
      Own own;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own.x[i] = x[i] * factor;
      return own;
    }
  };

  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  // The place of kOwn channels in a row of Tile, Level or Columns.
  template <class Rows>
  FI_DEVICE static unsigned own_place(int row, int channel) {
    return Rows::place(row, channel / 8) + channel % 8 * 2;
  }
  FI_DEVICE static Vec<T, kOwn> elements(const char* tile, int row, int channel) {
    return fi::load<T, kOwn>(reinterpret_cast<const T*>(tile + own_place<Tile>(row, channel)));
  }
  FI_DEVICE static void store(char* to, const Own& own) {
    Vec<T, kOwn> rounded;
    from_float(own.x, rounded);
    *reinterpret_cast<Vec<T, kOwn>*>(to) = rounded;
  }

  FI_DEVICE static void load(char* tile, const void* base, const int64_t (&strides)[2], int64_t token, int head,
                             int rows) {
    const T* first = static_cast<const T*>(base) + token * strides[0] + head * strides[1];
    Tile::template load<kThreads>(address(tile), Tile::template source<kThreads>(first, strides[0]), strides[0], rows);
  }
  // Tokens that do not exist change nothing.
  FI_DEVICE void load_gates(Own (&gates)[16], int64_t token, int head, int strip, int rows) const {
    if (threadIdx.x < kChunkTokens) {
      const int t = threadIdx.x;
      float beta = t < rows ? 1.f : 0.f;
      if (p.beta && t < rows) beta = p.beta[(token + t) * p.beta_strides[0] + head * p.beta_strides[1]];
      shared.beta[0][t] = beta;
    }
    const float* from = p.g + (token + 16 * strip) * p.g_strides[0] + head * p.g_strides[1] + kOwn * lane();
    const int own = rows - 16 * strip;
    if (own >= 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i, from += p.g_strides[0]) gates[i] = *reinterpret_cast<const Own*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i, from += p.g_strides[0]) {
        gates[i] = Own::ones();
        if (i < own) gates[i] = *reinterpret_cast<const Own*>(from);
      }
    }
  }

  // The decay of a strip; of the strips from `begin` to before `end`.
  FI_DEVICE Own total(int strip, int channel) const {
    return reinterpret_cast<const Own&>(shared.totals[strip][channel]);
  }
  FI_DEVICE Own total(int begin, int end, int channel) const {
    Own product = Own::ones();
    for (int strip = begin; strip < end; ++strip) product = product * total(strip, channel);
    return product;
  }

  // The blocks of A and of the scores on the diagonal, lengths of rows, and the decay of the strip.
  FI_DEVICE void fill_diagonal(int strip, int channel, const Own (&gates)[16], char* scores) const {
    char* block = shared.scores[strip] + 16 * lane();
    *reinterpret_cast<uint4*>(block) = make_uint4(0, 0, 0, 0);
    __syncwarp();
    measure_rows(strip);
    fill_level<0>(strip, channel, gates);
    fill_level<1>(strip, channel, gates);
    fill_level<2>(strip, channel, gates);
    fill_level<3>(strip, channel, gates);
    reinterpret_cast<uint4*>(scores + Matrix::block(strip, strip))[lane()] = *reinterpret_cast<const uint4*>(block);
    // In the order of level 3. NOTE: in the order of decay_rows, its products are computed here, and spill.
    Own low = gates[7], high = gates[8];
#pragma unroll
    for (int i = 1; i < 8; ++i) low = low * gates[7 - i], high = high * gates[8 + i];
    reinterpret_cast<Own&>(shared.totals[strip][channel]) = low * high;
  }
  FI_DEVICE T& score(int strip, int row, int column) const {
    return *reinterpret_cast<T*>(shared.scores[strip] + (row / 8 * 2 + column / 8) * 128 + row % 8 * 16 +
                                 column % 8 * 2);
  }
  // 1 / length of rows of k and q, and their scores on the diagonal: 8 rows of k and of q are operand a, and each of
  // them operand b.
  FI_DEVICE void measure_rows(int strip) const {
    float of_k[2][4] = {}, of_q[2][4] = {};
    const unsigned from = address(lane() & 8 ? shared.q : shared.k) + Tile::place(16 * strip + lane() % 8, lane() / 16);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned a[4];
        ldmatrix_x4(a, (from ^ step % 4 * 32) + step / 4 * Tile::kBlockBytes + half * 8 * 128);
        mma_m16n8k16(of_k[half], a, a[0], a[2], T());
        mma_m16n8k16(of_q[half], a, a[1], a[3], T());
      }
    const int row = lane() / 4;
    if (lane() % 4 == row / 2) {  // the lane with the diagonals
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* d = of_k[half];
        const float kk = row % 2 ? d[1] : d[0], qk = row % 2 ? d[3] : d[2];
        const float qq = row % 2 ? of_q[half][3] : of_q[half][2];
        const float inverse_k = inverse_length(kk), inverse_q = inverse_length(qq) * p.scale;
        shared.inverse[0][16 * strip + 8 * half + row] = inverse_k;
        shared.inverse[1][16 * strip + 8 * half + row] = inverse_q;
        score(strip, 8 * half + row, 8 * half + row) = from_float<T>(qk * inverse_k * inverse_q);
      }
    }
    __syncwarp();
  }
  FI_DEVICE float inverse_length(float square) const { return p.l2norm ? rsqrtf(square + 1e-6f) : 1.f; }

  // The products of the rows of upper segments of 2^kLevel rows with those of the lower ones before them.
  template <int kLevel>
  FI_DEVICE void fill_level(int strip, int channel, const Own (&gates)[16]) const {
    constexpr int kSize = 1 << kLevel;
    asm volatile("" : "+r"(channel));  // NOTE: else the addresses of all levels are kept, and spill
    char* level = shared.levels[strip];
    const char *k = shared.k + strip * kStripBytes, *q = shared.q + strip * kStripBytes;
#pragma unroll
    for (int first = 0; first < 8; first += kSize) {  // a segment, counted in rows of its kind
      const int upper = 2 * first + kSize;
      Own decay = gates[upper];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (i > 0) decay = decay * gates[upper + i];
        store(level + own_place<Level>(first + i, channel), Own::of(elements(k, upper + i, channel)) * decay);
        store(level + own_place<Level>(8 + first + i, channel), Own::of(elements(q, upper + i, channel)) * decay);
      }
      *reinterpret_cast<Vec<T, kOwn>*>(level + own_place<Level>(16 + first + kSize - 1, channel)) =
          elements(k, upper - 1, channel);
      if constexpr (kSize > 1) decay = gates[upper - 1];
#pragma unroll
      for (int i = kSize - 2; i >= 0; --i) {
        store(level + own_place<Level>(16 + first + i, channel), Own::of(elements(k, 2 * first + i, channel)) * decay);
        decay = decay * gates[2 * first + i];
      }
    }
    __syncwarp();
    float d[2][4] = {};
    const unsigned from_a = address(level) + Level::place(lane() % 16, lane() / 16);
    const unsigned from_b = address(level) + Level::place(16 + lane() % 8, lane() / 8);
#pragma unroll
    for (int step = 0; step < kD / 16; step += 2) {
      unsigned b[4];
      ldmatrix_x4(b, (from_b ^ step % 4 * 32) + step / 4 * Level::kBlockBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned a[4];
        ldmatrix_x4(a, (from_a ^ (step + i) % 4 * 32) + step / 4 * Level::kBlockBytes);
        mma_m16n8k16(d[i], a, b[2 * i], b[2 * i + 1], T());
      }
    }
    // A lane has a row of the upper segments and two of the lower ones.
    const int n = lane() / 4, m = lane() % 4 * 2;
    const int row = (n >> kLevel << (kLevel + 1)) + kSize + n % kSize, first = 16 * strip;
    const float of_k = shared.inverse[0][first + row] * shared.beta[0][first + row];
    const float of_q = shared.inverse[1][first + row];
    if constexpr (kLevel == 0) {
      const float to = shared.inverse[0][first + row - 1];
      const bool odd = n % 2;
      if (m == n - odd) {
        const float kk = odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0], qk = odd ? d[0][3] + d[1][3] : d[0][2] + d[1][2];
        shared.diagonal.blocks[strip][row * Inverse::kPitch + row - 1] = of_k * to * kk;
        score(strip, row, row - 1) = from_float<T>(of_q * to * qk);
      }
    } else if (n >> kLevel == m >> kLevel) {
      const int column = (m >> kLevel << (kLevel + 1)) + m % kSize;
      const float2 to = *reinterpret_cast<const float2*>(&shared.inverse[0][first + column]);
      *reinterpret_cast<float2*>(&shared.diagonal.blocks[strip][row * Inverse::kPitch + column]) =
          make_float2(of_k * to.x * (d[0][0] + d[1][0]), of_k * to.y * (d[0][1] + d[1][1]));
      reinterpret_cast<unsigned&>(score(strip, row, column)) =
          pack_pair(of_q * to.x * (d[0][2] + d[1][2]), of_q * to.y * (d[0][3] + d[1][3]), T());
    }
    __syncwarp();
  }

  // Writes k with the decay to the beginning of each later strip, and to global memory with that to the end of the
  // chunk.
  FI_DEVICE void decay_columns(int strip, int channel, const Own (&gates)[16], char* to) const {
    const char* k = shared.k + strip * kStripBytes;
    for (int later = strip + 1; later < kStrips; ++later) {
      Own decay = total(strip + 1, later, channel);
      char* columns = shared.columns[later * (later - 1) / 2 + strip];
#pragma unroll
      for (int i = 15; i >= 0; --i) {
        store(columns + own_place<Columns>(i, channel), Own::of(elements(k, i, channel)) * decay);
        decay = decay * gates[i];
      }
    }
    Own decay = total(strip + 1, kStrips, channel);
    to += strip * kStripBytes;
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      store(to + own_place<Tile>(i, channel),
            Own::of(elements(k, i, channel)) * decay * shared.inverse[0][16 * strip + i]);
      decay = decay * gates[i];
    }
  }
  // Replaces k and q by those with the decay from the beginning of the strip, and writes to global memory those with
  // the decay from the beginning of the chunk.
  FI_DEVICE void decay_rows(int strip, int channel, const Own (&gates)[16], char* to) const {
    char *k = shared.k + strip * kStripBytes, *q = shared.q + strip * kStripBytes;
    const Own before = total(0, strip, channel);
    Own decay = Own::ones();
    to += strip * kStripBytes;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      decay = decay * gates[i];
      decay_row(k, i, channel, to, decay, before * shared.inverse[0][16 * strip + i]);
      decay_row(q, i, channel, to + Tile::kBytes, decay, before * shared.inverse[1][16 * strip + i]);
    }
  }
  FI_DEVICE static void decay_row(char* tile, int row, int channel, char* to, const Own& decay, const Own& further) {
    const Own own = Own::of(elements(tile, row, channel)) * decay;
    store(tile + own_place<Tile>(row, channel), own);
    store(to + own_place<Tile>(row, channel), own * further);
  }

  // The decay of the chunk.
  FI_DEVICE void write_last(float* to) const {
    if (threadIdx.x >= kD) return;
    float decay = shared.totals[0][threadIdx.x];
#pragma unroll
    for (int strip = 1; strip < kStrips; ++strip) decay *= shared.totals[strip][threadIdx.x];
    to[threadIdx.x] = decay;
  }

  // A and the scores left of the diagonal block of a strip.
  template <int kStrip>
  FI_DEVICE void fill(char* scores) const {
    float kk[2 * kStrip][4] = {}, qk[2 * kStrip][4] = {};
    // Of 16 rows and columns, as operand a and as operand b.
    int own = lane();
    asm volatile("" : "+r"(own));  // as for channel
    const unsigned from_a = address(shared.k) + kStrip * kStripBytes + Tile::place(own % 16, own / 16);
    const unsigned from_b =
        address(shared.columns[kStrip * (kStrip - 1) / 2]) + Columns::place(own / 16 * 8 + own % 8, own / 8 % 2);
#pragma unroll 2
    for (int step = 0; step < kD / 16; ++step) {
      const unsigned swizzle = step % 4 * 32, block = step / 4 * Tile::kBlockBytes;
      unsigned k[4], q[4], b[4];
      ldmatrix_x4(k, (from_a ^ swizzle) + block);
      ldmatrix_x4(q, (from_a ^ swizzle) + block + Tile::kBytes);
#pragma unroll
      for (int column = 0; column < kStrip; ++column) {
        ldmatrix_x4(b, (from_b ^ swizzle) + step / 4 * Columns::kBlockBytes + column * Columns::kBytes);
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
