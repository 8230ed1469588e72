// The part of chunk_gated_delta_rule that inverts the triangular matrices of a chunk, by mma.sync.
#pragma once
#include "fi/linear_attention/chunk_tiles.cuh"

namespace fi {

// T = (I + A)^-1 diag(beta) of the heads of a CTA of four warps.
template <class T>
struct ChunkInverse {
  using Matrix = LowerTriangle;
  static constexpr int kPitch = 20, kDiagonal = 16 * kPitch + 4;  // floats: two blocks lie in distinct banks

  // A of a head: in fp32 the blocks of 16 x 16 on the diagonal, in fp16 the other blocks, in whose place comes
  // (I + A)^-1: fp16 has as many bits as tf32, and for keys of length 1 and beta <= 1 all elements are at most 1.
  struct Blocks {
    alignas(128) char bytes[Matrix::kBytes];
  };
  struct Diagonal {
    alignas(16) float blocks[4][kDiagonal];
  };
  Blocks* heads;
  Diagonal* diagonals;
  const float (*beta)[kChunkTokens];
  int count;

  // T = (I + A)^-1 diag(beta): diagonal blocks of 16 by forward substitution in fp32, then two levels of
  // [X 0; B Y]^-1 = [X^-1 0; -Y^-1 B X^-1  Y^-1] by mma. Two warps have the upper and the lower half of a head, until
  // the halves meet.
  FI_DEVICE void run(int strip, char* solved) const {
    const int warp = threadIdx.x / 32;
    for (int i = warp / 2; i < count; i += 2) invert_half(i, warp % 2, solved + i * Matrix::kBytes);
    __syncthreads();
    const int m = strip / 2, n = strip % 2;
    for (int i = 0; i < count; ++i) {
      const char* blocks = heads[i].bytes;
      float product[2][2][4] = {}, d[2][4] = {};  // of Y^-1 and B, at columns that are not above the diagonal of X^-1
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (k > m) break;
        unsigned y[4];
        ldmatrix_x4(y, operand(blocks + Matrix::block(2 + m, 2 + k)));
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (j >= n) multiply_block(product[j], y, blocks + Matrix::block(2 + k, j));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j < n) continue;
        unsigned a[4];
        pack(a, product[j]);
        multiply_block(d, a, blocks + Matrix::block(j, n));
      }
      write_block(i, n, d, solved + i * Matrix::kBytes + Matrix::block(2 + m, n));
    }
  }

 private:
  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }

  FI_DEVICE void invert_half(int i, int half, char* to) const {
    char* blocks = heads[i].bytes;
    const int own = 2 * half + lane() / 16;
    substitute(diagonals[i].blocks[own], blocks + Matrix::block(own, own));
    __syncwarp();
    const int first = Matrix::block(2 * half, 2 * half), second = Matrix::block(2 * half + 1, 2 * half + 1);
    unsigned x[4], y[4], a[4];
    ldmatrix_x4(x, operand(blocks + first));
    write_halves(i, 2 * half, x, to + first);
    ldmatrix_x4(y, operand(blocks + second));
    write_halves(i, 2 * half + 1, y, to + second);
    float product[2][4] = {}, d[2][4] = {};
    const int below = Matrix::block(2 * half + 1, 2 * half);
    multiply_block(product, y, blocks + below);
    pack(a, product);
    multiply_block(d, a, blocks + first);
    __syncwarp();
#pragma unroll
    for (int part = 0; part < 4; ++part)
      *reinterpret_cast<unsigned*>(blocks + below + 128 * part + 4 * lane()) =
          pack_pair(-d[part % 2][part / 2 * 2], -d[part % 2][part / 2 * 2 + 1], __half());
    write_block(i, 2 * half, d, to + below);
  }
  // A lane has a column of the inverse of a diagonal block, 16 lanes each of two blocks.
  FI_DEVICE static void substitute(const float* block, char* to) {
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
    __half* at = reinterpret_cast<__half*>(to + column / 8 * 128 + column % 8 * 2);
#pragma unroll
    for (int row = 0; row < 16; ++row) at[row / 8 * 128 + row % 8 * 8] = __float2half_rn(x[row]);
  }

  // The address for ldmatrix of a block in fp16 as operand a or, transposed, as operand b.
  FI_DEVICE static unsigned operand(const char* block) {
    return address(block) + (lane() / 8 % 2 * 2 + lane() / 16) * 128 + lane() % 8 * 16;
  }
  FI_DEVICE static void multiply_block(float (&d)[2][4], const unsigned (&left)[4], const char* block) {
    unsigned b[4];
    ldmatrix_x4_trans(b, operand(block));
    mma_m16n8k16(d[0], left, b[0], b[1], __half());
    mma_m16n8k16(d[1], left, b[2], b[3], __half());
  }
  FI_DEVICE static void pack(unsigned (&a)[4], const float (&d)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pack_pair(d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1], __half());
  }

  // A block of column `column` of blocks, times diag(beta) of head i, in the type of q.
  FI_DEVICE float2 beta_of(int i, int column, int half) const {
    return *reinterpret_cast<const float2*>(&beta[i][16 * column + 8 * half + 2 * (lane() % 4)]);
  }
  FI_DEVICE void write_block(int i, int column, const float (&negative)[2][4], char* to) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 beta = beta_of(i, column, half);
#pragma unroll
      for (int low = 0; low < 2; ++low)
        *reinterpret_cast<unsigned*>(to + 256 * low + 128 * half + 4 * lane()) =
            pack_pair(-beta.x * negative[half][2 * low], -beta.y * negative[half][2 * low + 1], T());
    }
  }
  FI_DEVICE void write_halves(int i, int column, const unsigned (&halves)[4], char* to) const {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float2 beta = beta_of(i, column, part / 2);
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(halves[part]));
      *reinterpret_cast<unsigned*>(to + 128 * (part % 2 * 2 + part / 2) + 4 * lane()) =
          pack_pair(beta.x * x.x, beta.y * x.y, T());
    }
  }
};

}  // namespace fi
