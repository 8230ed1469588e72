// Products of chunks by mma.sync, on sm_80 and later.
#pragma once
#include "fi/linear_attention/chunk_tiles.cuh"

namespace fi {

// Products of 16 rows in registers of a warp with tiles of 64 tokens.
template <class T, int kD>
struct MmaProducts {
  using Tile = ChunkTile<kD>;
  using Matrix = LowerTriangle;
  static constexpr bool kAsync = false;
  static constexpr int kAlignment = 128, kSteps = kD / 16, kBlocks = kChunkTokens / 16;

  struct Arrivals {};
  FI_DEVICE static void prepare(Arrivals&) {}
  FI_DEVICE static void wait(Arrivals&, int) {}
  FI_DEVICE static void fence() {}
  template <int kPending, int kCount>
  FI_DEVICE static void finish(float (&)[kCount]) {}

  // d = a times the rows of a tile, transposed.
  FI_DEVICE static void rows(float (&d)[32], const unsigned (&a)[kSteps][4], const char* tile) {
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = 0.f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        unsigned b[4];
        Tile::b_fragment(b, address(tile), pair, step);
        multiply(d, pair, a[step], b);
      }
  }
  // d = a times a lower triangular matrix, transposed, or with kAdd d += that: columns 0 to 31, and 32 to 63.
  template <bool kAdd = false>
  FI_DEVICE static void lower(float (&d)[2][16], const unsigned (&a)[kBlocks][4], const char* matrix) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (!kAdd) d[i / 16][i % 16] = 0.f;
#pragma unroll
    for (int step = 0; step < kBlocks; ++step)
#pragma unroll
      for (int pair = step; pair < 4; ++pair) {
        unsigned b[4];
        Matrix::b_fragment(b, address(matrix), pair, step);
        multiply(d[pair / 2], pair % 2, a[step], b);
      }
  }
  // d += a times a tile.
  FI_DEVICE static void columns(float (&d)[kD / 2], const unsigned (&a)[kBlocks][4], const char* tile) {
#pragma unroll
    for (int step = 0; step < kBlocks; ++step)
#pragma unroll
      for (int pair = 0; pair < kD / 16; ++pair) {
        unsigned b[4];
        Tile::b_fragment_of_columns(b, address(tile), pair, step);
        multiply(d, pair, a[step], b);
      }
  }

  // The same of 64 columns.
  FI_DEVICE static void column_block(float (&d)[32], const unsigned (&a)[kBlocks][4], const char* tile, int block) {
#pragma unroll
    for (int step = 0; step < kBlocks; ++step)
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        unsigned b[4];
        Tile::b_fragment_of_columns(b, address(tile), 4 * block + pair, step);
        multiply(d, pair, a[step], b);
      }
  }

 private:
  FI_DEVICE static unsigned address(const char* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  template <int kCount>
  FI_DEVICE static void multiply(float (&d)[kCount], int pair, const unsigned (&a)[4], const unsigned (&b)[4]) {
    mma_m16n8k16(reinterpret_cast<float (&)[4]>(d[8 * pair]), a, b[0], b[1], T());
    mma_m16n8k16(reinterpret_cast<float (&)[4]>(d[8 * pair + 4]), a, b[2], b[3], T());
  }
};

}  // namespace fi
