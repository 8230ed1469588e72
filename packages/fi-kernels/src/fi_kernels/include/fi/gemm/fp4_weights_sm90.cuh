// fp4 weights in registers: eight e2m1 of a word to pairs of bf16, and the scales of 32 neighbouring weights.
#pragma once
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/bf16.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/types.h"

namespace fi {

// The eight weights of a word times 2^-126, as pairs of bf16: y[j] has elements j and j + 4.
// An e2m1 is s e e m. With the sign at bit 15 and e e m at bits 8 to 6 it is a bf16, subnormals included. One
// multiplication by 2^(a + 6) + 2^a puts both there, and a mask removes the rest; those of the highest four bits need a
// shift only. 12 instructions, of which three run in the FMA pipe.
FI_DEVICE void dequantize_e2m1(unsigned (&y)[4], unsigned word) {
  constexpr unsigned kBits = 0x81c081c0u;
  const unsigned low = word >> 6;
  y[0] = (word & 0x000f000fu) * 0x1040u & kBits;
  y[1] = (word & 0x00f000f0u) * 0x0104u & kBits;
  y[2] = (low & 0x003c003cu) * 0x0410u & kBits;
  y[3] = (low & 0x01c001c0u) | (word & 0x80008000u);
}

// What both formats have.
struct Fp4Weights {
  FI_DEVICE static void dequantize(unsigned (&y)[4], unsigned word) { dequantize_e2m1(y, word); }
  // Eight elements of a token as pairs (0, 4), (1, 5), (2, 6), (3, 7).
  FI_DEVICE static uint4 pairs(const uint4& x) {
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
  }
};

// The two scales of groups of 16 in 32 k, as pairs of bf16 that also remove 2^-126 but for 2^-8.
struct Nvfp4Factors {
  unsigned scale[2];  // of a group, twice

  Nvfp4Factors() = default;
  FI_DEVICE explicit Nvfp4Factors(unsigned codes) {
    const unsigned both =
        multiply_bf16x2(dequantize_pair(codes, __nv_fp8_e4m3(), __nv_bfloat16()), 0x7a807a80u);  // 2^118
    scale[0] = __byte_perm(both, 0, 0x1010);
    scale[1] = __byte_perm(both, 0, 0x3232);
  }
  FI_DEVICE void multiply(unsigned (&y)[4], int word) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = multiply_bf16x2(y[j], scale[word / 2]);
  }
};

struct Nvfp4Weights : Fp4Weights {
  static constexpr int kGroup = 16, kTiles = 4;  // tiles of 4 groups of 256 k
  static constexpr bool kLargeScales = false;
  static constexpr float kFactor = 256.f;  // of sums
  template <bool>
  using Factors = Nvfp4Factors;

  // Where the scales of chunk `chunk` of 32 k are in those of a row.
  FI_DEVICE static int place(int chunk) { return chunk / 2 * 512 + chunk % 2 * 2; }
  // The bits of the first `groups` groups. Scales beyond k are 0: padding may be NaN.
  FI_DEVICE static unsigned mask(int groups) { return groups >= 2 ? 0xffff : groups == 1 ? 0xff : 0; }
  FI_DEVICE static unsigned code(const uint8_t* from, unsigned mask) {
    return *reinterpret_cast<const uint16_t*>(from) & mask;
  }
};

// The scale of the group of 32 k, 2^(code - 127). bf16 holds 2^(code - 1), which also removes 2^-126, for codes up to
// kMost. kAny: larger ones, which weights hardly have, take a second factor.
template <bool kAny>
struct Mxfp4Factors {
  unsigned scale, second;

  Mxfp4Factors() = default;
  FI_DEVICE explicit Mxfp4Factors(unsigned code) {
    if constexpr (kAny) {
      const unsigned bits = code == 255 ? 0x7fc0u : min(code + 126, 254u) << 7, more = code > 128 ? code - 1 : 127;
      scale = bits | bits << 16;
      second = more << 7 | more << 23;
    } else {
      scale = code * 0x00800080u + 0x3f003f00u;
    }
  }
  FI_DEVICE void multiply(unsigned (&y)[4], int) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[j] = multiply_bf16x2(y[j], scale);
      if constexpr (kAny) y[j] = multiply_bf16x2(y[j], second);
    }
  }
};

struct Mxfp4Weights : Fp4Weights {
  static constexpr int kGroup = 32, kTiles = 2, kMost = 128;
  static constexpr bool kLargeScales = true;
  static constexpr float kFactor = 1.f;
  template <bool kAny>
  using Factors = Mxfp4Factors<kAny>;

  FI_DEVICE static int place(int chunk) { return chunk / 4 * 512 + chunk % 4; }
  FI_DEVICE static unsigned mask(int groups) { return groups >= 1 ? 0xff : 0; }
  FI_DEVICE static unsigned code(const uint8_t* from, unsigned mask) { return *from & mask; }
};

}  // namespace fi
