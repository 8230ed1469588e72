// Shared-memory tiles of the chunk kernels and the mma.sync fragments that are read from them.
#pragma once
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/linear_attention/chunk_gated_delta_rule.h"

namespace fi {

// 64 rows of kWidth 16-bit elements, in column blocks of 64 with the 128-byte swizzle that wgmma reads; narrower rows
// are swizzled so that eight of them hold one chunk of 16 bytes in eight groups of banks.
template <int kWidth>
struct ChunkTile {
  static constexpr int kBytes = kChunkTokens * 2 * kWidth, kParts = kWidth / 8;
  static constexpr int kBlockBytes = kChunkTokens * 128;  // of a column block

  FI_DEVICE static int place(int row, int part) {
    if constexpr (kParts >= 8)
      return part / 8 * kBlockBytes + row * 128 + ((part % 8 ^ row % 8) << 4);
    else
      return row * 16 * kParts + ((part ^ (row / 2 % kParts)) << 4);
  }

  // Where this thread begins to copy rows that begin at `rows`.
  template <int kThreads, class T>
  FI_DEVICE static const T* source(const T* rows, int64_t stride) {
    return rows + threadIdx.x / kParts * stride + threadIdx.x % kParts * 8;
  }
  // Copies rows of global memory from source() on; those from `rows` on become 0. The swizzle repeats after 8 rows, so
  // a thread computes its addresses once: with addresses of each copy, copies took half of all instructions.
  template <int kThreads, class T>
  FI_DEVICE static void load(unsigned to, const T* source, int64_t stride, int rows) {
    constexpr int kStep = kThreads / kParts, kPeriod = kStep < 8 ? 8 / kStep : 1,
                  kRowBytes = kParts < 8 ? 16 * kParts : 128;
    const int row = threadIdx.x / kParts, part = threadIdx.x % kParts;
    unsigned at[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) at[i] = to + place(row + i * kStep, part);
    const auto shared = [&](int i) { return at[i % kPeriod] + i / kPeriod * kPeriod * kStep * kRowBytes; };
    if (rows >= kChunkTokens) {
#pragma unroll
      for (int i = 0; i < kChunkTokens / kStep; ++i, source += kStep * stride) cp_async_16(shared(i), source);
    } else {
      const T* first = source - row * stride;
#pragma unroll
      for (int i = 0; i < kChunkTokens / kStep; ++i, source += kStep * stride) {
        const bool exists = row + i * kStep < rows;
        cp_async_16(shared(i), exists ? source : first, exists);
      }
    }
  }
  // Operand b of two n tiles, whose columns are rows 16 * pair .. + 15; its k are columns 16 * step .. + 15.
  FI_DEVICE static void b_fragment(unsigned (&b)[4], unsigned tile, int pair, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(b, tile + place(16 * pair + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
  }
  // Operand b of two n tiles, whose columns are columns 16 * pair .. + 15; its k are rows 16 * step .. + 15.
  FI_DEVICE static void b_fragment_of_columns(unsigned (&b)[4], unsigned tile, int pair, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(b, tile + place(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * pair + lane / 16));
  }
  // As accumulators of the transposed tile: columns 16 * column .. + 15 by rows 16 * pair .. + 15, in pairs.
  FI_DEVICE static void transposed(unsigned (&d)[4], unsigned tile, int column, int pair) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(d, tile + place(16 * pair + lane / 16 * 8 + lane % 8, 2 * column + lane / 8 % 2));
  }
};

// The blocks of 16 x 16 on and below the diagonal of a matrix of 64 x 64, each as four contiguous matrices of 8 x 8 in
// the order of operand b: the lanes of ldmatrix address its 512 bytes one after the other. First the blocks of rows 0
// to 31, column by column, then those of rows 32 to 63.
struct LowerTriangle {
  static constexpr int kBytes = 2 * kChunkMatrix;

  FI_DEVICE static constexpr int block(int row, int column) {
    return (row < 2 ? row + column : row + 2 * column + 1 - column / 3) * 512;
  }
  // Of 8 elements; part: columns 8 * part and on.
  FI_DEVICE static int place(int row, int part) {
    return block(row / 16, part / 2) + (row % 16 / 8 * 2 + part % 2) * 128 + row % 8 * 16;
  }
  // Writes what load does not write.
  template <int kThreads, class Stages>
  FI_DEVICE static void clear(Stages&) {}
  // copy(place, source) for 16 bytes each: offsets in shared and in global memory.
  template <int kThreads, class Copy>
  FI_DEVICE static void load(Copy copy) {
#pragma unroll
    for (int i = 0; i < (kBytes / 16 + kThreads - 1) / kThreads; ++i) {
      const int at = 16 * (threadIdx.x + i * kThreads);
      if (16 * (i + 1) * kThreads <= kBytes || at < kBytes) copy(at, at);
    }
  }
  // Operand b of two n tiles, whose columns are rows 16 * pair .. + 15; its k are columns 16 * step .. + 15.
  FI_DEVICE static void b_fragment(unsigned (&b)[4], unsigned matrix, int pair, int step) {
    ldmatrix_x4(b, matrix + block(pair, step) + threadIdx.x % 32 * 16);
  }
};

// The same in shared memory, with the two blocks above the diagonal that complete pairs of rows, which are 0: the two
// blocks of a column, of rows 0 to 31 or 32 to 63, are one unswizzled operand of wgmma with 32 columns.
struct PairedTriangle {
  static constexpr int kColumnBytes = 2 * 512, kLowerRows = 2 * kColumnBytes, kBytes = 6 * kColumnBytes;
  // The runs of blocks without zeros between them: where they begin in a LowerTriangle, and here.
  static constexpr int kRuns = 3;
  FI_DEVICE static constexpr int run_begin(int i) { return (i == 0 ? 0 : i == 1 ? 2 : i == 2 ? 9 : 10) * 512; }
  FI_DEVICE static constexpr int run_place(int i) { return run_begin(i) + i * 512; }

  // Writes the zeros.
  template <int kThreads, int kStages>
  FI_DEVICE static void clear(char (&stages)[kStages][kBytes]) {
    for (int i = threadIdx.x; i < kStages * 64; i += kThreads)
      *reinterpret_cast<uint4*>(stages[i / 64] + (i % 64 < 32 ? 2 : 9) * 512 + i % 64 * 16) = make_uint4(0, 0, 0, 0);
  }
};

// Accumulators of 16 columns, from column 16 * step on, as an operand a: columns become k.
template <class T, int kCount>
FI_DEVICE void operand_of(unsigned (&a)[4], const float (&d)[kCount], int step) {
  a[0] = pack_pair(d[8 * step], d[8 * step + 1], T());
  a[1] = pack_pair(d[8 * step + 2], d[8 * step + 3], T());
  a[2] = pack_pair(d[8 * step + 4], d[8 * step + 5], T());
  a[3] = pack_pair(d[8 * step + 6], d[8 * step + 7], T());
}

// The chunk or segment of `length` tokens with a number: its sequence, and its tokens. A sequence without tokens has
// one of 0 tokens; some numbers have none.
struct TokenSpan {
  int sequence;
  bool exists;
  int64_t begin, tokens;  // begin: from that of the sequence on
  int64_t token;          // the first

  FI_DEVICE static int first_number(const ChunkGatedDeltaRuleParams& p, int sequence, Divisor length) {
    return divide(static_cast<uint32_t>(p.offsets.at(sequence)), length) + sequence;
  }
  FI_DEVICE static TokenSpan numbered(const ChunkGatedDeltaRuleParams& p, int number, Divisor length) {
    int low = 0, high = p.sequences;  // the last sequence whose first number is not above it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_number(p, middle, length) <= number)
        low = middle;
      else
        high = middle;
    }
    const int index = number - first_number(p, low, length), size = static_cast<int>(length.value);
    TokenSpan span{low, index == 0, int64_t{index} * size, 0, p.offsets.at(low) + int64_t{index} * size};
    const int64_t left = p.offsets.at(low + 1) - span.token;
    if (index >= 0 && left > 0) span.exists = true, span.tokens = left < size ? left : size;
    return span;
  }
  FI_DEVICE static TokenSpan whole(const ChunkGatedDeltaRuleParams& p, int sequence) {
    const int64_t token = p.offsets.at(sequence);
    return {sequence, true, 0, p.offsets.at(sequence + 1) - token, token};
  }
  FI_DEVICE bool is_last(const ChunkGatedDeltaRuleParams& p) const {
    return token + tokens >= p.offsets.at(sequence + 1);
  }
};

}  // namespace fi
