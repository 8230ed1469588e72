// GEMM by mma.sync, on sm_80 and later: cp.async brings stages of 64 bytes of k, ldmatrix reads them. It has no need of
// TMA, so it takes rows of any alignment.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/ptx/mma_sm89.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/gemm/gemm_mma.h"
#include "fi/gemm/work_tiles.cuh"

namespace fi {

// Whether the tensor cores multiply fp8. They add such products with fewer bits than fp32 has, so the sums of each 128
// k have separate accumulators.
#if __CUDA_ARCH__ >= 890
constexpr bool kFp8Mma = true;
#else
constexpr bool kFp8Mma = false;
#endif

// Two fp8 as halves, NaN included: without an instruction, halves() gives 480 for it, which is no e4m3 number.
template <class T>
FI_DEVICE unsigned halves_or_nan(unsigned quad, bool upper) {
  unsigned x = upper ? upper_halves(quad, T()) : halves(quad, T());
#if __CUDA_ARCH__ < 890
  if constexpr (kIsSame<T, __nv_fp8_e4m3>) {
    unsigned nan;
    asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(nan) : "r"(x & 0x7fff7fffu), "r"(0x5f805f80u));
    x |= nan & 0x7fff7fffu;
  }
#endif
  return x;
}

// kRows x kColumns: of a tile, which kWarpsM x kWarpsN warps share. kVectors: rows of a and b are K-major and aligned
// to 16 bytes; otherwise elements are loaded one by one, with any strides. kBlockScales: scales of 128 k.
template <class A, class B, class Out, int kRows, int kColumns, int kWarpsM, int kWarpsN, int kStages, bool kVectors,
          bool kBlockScales, template <int, int, class> class Tiles>
struct GemmMma {
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN, kLine = 64, kChunks = kLine / 16;
  static constexpr int kElements = 16 / sizeof(A), kStageK = kLine / sizeof(A), kScaleStages = 128 / kStageK;
  static constexpr int kMTiles = kRows / kWarpsM / 16, kNTiles = kColumns / kWarpsN / 8;
  static constexpr bool kInParts = kBlockScales || (sizeof(A) == 1 && kFp8Mma);
  static constexpr int kParts = kInParts ? kNTiles : 1;
  static_assert(kNTiles % 2 == 0 && kRows * kChunks % kThreads == 0 && kColumns * kChunks % kThreads == 0, "tile");

  struct Shared {
    alignas(128) char a[kStages][kRows * kLine];
    alignas(128) char b[kStages][kColumns * kLine];
  };

  const GemmMmaParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    pdl_wait();
    Tiles<kRows, kColumns, GemmMmaParams> tiles(p);
    GemmTile tile;
    while (tiles.next(tile)) {
      compute(tile);
      cp_async_wait<0>();
      __syncthreads();
    }
    pdl_launch_dependents();
  }

 private:
  // Chunk c of line l: eight lines hold one chunk in eight groups of banks.
  FI_DEVICE static int place(int line, int chunk) { return line * kLine + ((chunk ^ (line / 2 % kChunks)) << 4); }

  // One operand of a stage: a thread copies the same chunk of several lines. Beyond the `lines` that exist it copies
  // the last one again, whose products nothing stores.
  template <class T, int kLines>
  FI_DEVICE void load(char* to, const T* from, int64_t line_stride, int64_t k_stride, int lines, int k) const {
    const int chunk = threadIdx.x % kChunks, at = k + chunk * kElements;
    const int count = max(0, min(kElements, p.problem.k - at));
#pragma unroll
    for (int i = 0; i < kLines * kChunks / kThreads; ++i) {
      const int line = i * (kThreads / kChunks) + threadIdx.x / kChunks;
      const T* source = from + min(line, lines - 1) * line_stride;
      if constexpr (kVectors) {
        const unsigned shared_to = static_cast<unsigned>(__cvta_generic_to_shared(to));
        cp_async_16_part(shared_to + place(line, chunk), count > 0 ? source + at : source,
                         count * static_cast<int>(sizeof(T)));
      } else {
        unsigned words[4] = {};  // the compiler would put an array of elements in local memory
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          if (e < count) words[e * sizeof(T) / 4] |= bits(source + (at + e) * k_stride) << e * sizeof(T) % 4 * 8;
        *reinterpret_cast<uint4*>(to + place(line, chunk)) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  template <class T>
  FI_DEVICE static unsigned bits(const T* element) {
    if constexpr (sizeof(T) == 1)
      return *reinterpret_cast<const uint8_t*>(element);
    else
      return *reinterpret_cast<const uint16_t*>(element);
  }
  FI_DEVICE void load_stage(const GemmTile& tile, int step) const {
    const GemmProblem& q = p.problem;
    const int stage = step % kStages, k = step * kStageK;
    const A* a = static_cast<const A*>(q.a) + tile.a_batch * q.a_batch_stride + tile.row * q.a_row_stride;
    const B* b = static_cast<const B*>(q.b) + tile.b_batch * q.b_batch_stride + tile.column * q.b_row_stride;
    load<A, kRows>(shared.a[stage], a, q.a_row_stride, 1, tile.rows, k);
    load<B, kColumns>(shared.b[stage], b, q.b_row_stride, q.b_k_stride, q.n - tile.column, k);
  }

  // Four instructions' worth of a step of 32 bytes: 16 k of 16 bits, or 32 of 8.
  FI_DEVICE static void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (sizeof(A) == 2) {
      mma_m16n8k16(d, a, b0, b1, A());
    } else if constexpr (kFp8Mma) {
      mma_m16n8k32(d, a, b0, b1, A(), B());
    } else {
      // The pairs of bytes of a register are k of two instructions, for a and b alike.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned x[4] = {halves_or_nan<A>(a[2 * h], false), halves_or_nan<A>(a[2 * h + 1], false),
                               halves_or_nan<A>(a[2 * h], true), halves_or_nan<A>(a[2 * h + 1], true)};
        const unsigned y = h ? b1 : b0;
        mma_m16n8k16(d, x, halves_or_nan<B>(y, false), halves_or_nan<B>(y, true), __half());
      }
    }
  }

  FI_DEVICE void compute(const GemmTile& tile) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / kWarpsN * (kRows / kWarpsM), column = warp % kWarpsN * (kColumns / kWarpsN);
    const int a_line = row + lane % 16, a_chunk = lane / 16;
    const int b_line = column + lane / 16 * 8 + lane % 8, b_chunk = lane / 8 % 2;
    float d[kMTiles][kNTiles][4] = {}, part[kInParts ? kMTiles : 1][kParts][4] = {};
    float row_scale[kBlockScales ? kMTiles : 1][2], column_scale[kParts][2];
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < p.k_stages) load_stage(tile, i);
      cp_async_commit();
    }
    for (int step = 0; step < p.k_stages; ++step) {
      if constexpr (kBlockScales) {
        if (step % kScaleStages == 0) load_scales(row_scale, column_scale, tile, row, column, step / kScaleStages);
      }
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < p.k_stages) load_stage(tile, step + kStages - 1);
      cp_async_commit();
      const char *a = shared.a[step % kStages], *b = shared.b[step % kStages];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned x[kMTiles][4], y[kNTiles / 2][4];
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) ldmatrix_x4(x[i], a + place(a_line + i * 16, half * 2 + a_chunk));
#pragma unroll
        for (int j = 0; j < kNTiles / 2; ++j) ldmatrix_x4(y[j], b + place(b_line + j * 16, half * 2 + b_chunk));
#pragma unroll
        for (int i = 0; i < kMTiles; ++i)
#pragma unroll
          for (int j = 0; j < kNTiles; ++j)
            multiply(kInParts ? part[kInParts ? i : 0][kInParts ? j : 0] : d[i][j], x[i], y[j / 2][j % 2 * 2],
                     y[j / 2][j % 2 * 2 + 1]);
      }
      if constexpr (kInParts) {
        if (step % kScaleStages == kScaleStages - 1 || step == p.k_stages - 1)
          add_parts(d, part, row_scale, column_scale);
      }
    }
    store(d, tile, row + lane / 4, column + lane % 4 * 2);
  }

  // The scales of block t of 128 k for the rows and columns of this lane.
  FI_DEVICE void load_scales(float (&of_row)[kMTiles][2], float (&of_column)[kNTiles][2], const GemmTile& tile, int row,
                             int column, int t) const {
    const GemmProblem& q = p.problem;
    const int lane = threadIdx.x % 32;
    const float* a = q.a_scale + tile.a_batch * q.a_scale_batch_stride + t * q.a_scale_k_stride;
    const float* b = q.b_scale + tile.b_batch * q.b_scale_batch_stride + t * q.b_scale_k_stride;
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      const int at = tile.row + min(row + lane / 4 + i * 8, max(tile.rows, 1) - 1);
      of_row[i / 2][i % 2] = a[(q.a_scale_rows == 1 ? at : at / 128) * q.a_scale_row_stride];
    }
#pragma unroll
    for (int j = 0; j < 2 * kNTiles; ++j) {
      const int at = min(tile.column + column + lane % 4 * 2 + j / 2 * 8 + j % 2, q.n - 1);
      of_column[j / 2][j % 2] = b[(q.b_scale_rows == 1 ? at : at / 128) * q.b_scale_row_stride];
    }
  }
  template <int kM, int kN, int kScaleM>
  FI_DEVICE static void add_parts(float (&d)[kM][kN][4], float (&part)[kM][kN][4], const float (&of_row)[kScaleM][2],
                                  const float (&of_column)[kN][2]) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float scale = kBlockScales ? of_row[kBlockScales ? i : 0][e / 2] * of_column[j][e % 2] : 1.f;
          d[i][j][e] += part[i][j][e] * scale;
          part[i][j][e] = 0.f;
        }
  }

  // Rows `row` and `row` + 8 of each 16, and pairs of columns from `column` on of each 8.
  FI_DEVICE void store(const float (&d)[kMTiles][kNTiles][4], const GemmTile& tile, int row, int column) const {
    const GemmProblem& q = p.problem;
    const bool scaled = !kBlockScales && (q.a_scale || q.b_scale);
    Out* out = static_cast<Out*>(q.out) + tile.a_batch * q.out_batch_stride + tile.row * q.out_row_stride;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const int at = tile.column + column + j * 8, count = q.n - at;
      if (count <= 0) continue;
      float scale[2] = {1.f, 1.f}, bias[2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int own = min(at + e, q.n - 1);
        if (scaled && q.b_scale)
          scale[e] = q.b_scale[tile.b_batch * q.b_scale_batch_stride + own * q.b_scale_row_stride];
        if (q.bias) bias[e] = to_float(static_cast<const Out*>(q.bias)[own]);
      }
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) {
        const int own = row + i * 8;
        if (own >= tile.rows) continue;
        float of_row = 1.f;
        if (scaled && q.a_scale)
          of_row = q.a_scale[tile.a_batch * q.a_scale_batch_stride + (tile.row + own) * q.a_scale_row_stride];
        float x = d[i / 2][j][i % 2 * 2], y = d[i / 2][j][i % 2 * 2 + 1];
        if (scaled) x *= of_row * scale[0], y *= of_row * scale[1];
        x += bias[0], y += bias[1];
        Out* to = out + own * q.out_row_stride + at;
        if (p.pairs && count > 1) {
          if constexpr (sizeof(Out) == 2)
            *reinterpret_cast<unsigned*>(to) = pack_pair(x, y, Out());
          else
            *reinterpret_cast<float2*>(to) = {x, y};
        } else {
          to[0] = from_float<Out>(x);
          if (count > 1) to[1] = from_float<Out>(y);
        }
      }
    }
  }
};

// kBytes: of shared memory that the launch requests.
template <class A, class B, class Out, int kRows, int kColumns, int kWarpsM, int kWarpsN, int kStages, bool kVectors,
          bool kBlockScales, template <int, int, class> class Tiles, int kBytes>
FI_DEVICE void gemm_mma(const GemmMmaParams& p) {
  using Kernel = GemmMma<A, B, Out, kRows, kColumns, kWarpsM, kWarpsN, kStages, kVectors, kBlockScales, Tiles>;
  run_in_shared<Kernel, 128, kBytes>(p);
}

}  // namespace fi
