// e4m3 weights in registers: four of a word to pairs of bf16.
#pragma once
#include "fi/cuda/ptx/bf16.cuh"
#include "fi/types.h"

namespace fi {

// An e4m3 is s e e e e m m m. With the sign at bit 15 and the rest at bits 10 to 4 it is a bf16 of 2^-120 of its value,
// subnormals included. One scale of all weights is a factor of sums.
struct E4m3Weights {
  static constexpr int kBits = 8, kTurn = 4, kGroup = 1, kTiles = 0;
  static constexpr bool kLargeScales = false;
  static constexpr float kFactor = 1.f;
  using Chunk = uint2;  // four elements of a token

  template <bool>
  struct Factors {
    Factors() = default;
    FI_DEVICE explicit Factors(unsigned) {}
    FI_DEVICE void multiply(unsigned (&y)[2], int) const {
#pragma unroll
      for (int j = 0; j < 2; ++j) y[j] = multiply_bf16x2(y[j], 0x7b807b80u);  // 2^120
    }
  };

  // y[j] has elements j and j + 2.
  FI_DEVICE static void dequantize(unsigned (&y)[2], unsigned word) {
    y[0] = (word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u);
    y[1] = (word >> 4 & 0x07f007f0u) | (word & 0x80008000u);
  }
  FI_DEVICE static uint2 pairs(const uint2& x) {
    return make_uint2(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632));
  }
  FI_DEVICE static int place(int) { return 0; }
  FI_DEVICE static unsigned mask(int) { return 0; }
  FI_DEVICE static unsigned code(const uint8_t*, unsigned) { return 0; }
};

}  // namespace fi
