// e2m1 (4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign) from and to float, without the instructions of sm_100.
#pragma once
#include "fi/cuda/convert.cuh"

namespace fi {

struct E2m1 {};  // names the format; two values share a byte, the first in the lower half

FI_DEVICE float e2m1_to_float(uint32_t code) {
  const uint32_t magnitude = code & 7;  // 0 and 1 are subnormal: 0 and 0.5
  const float value = magnitude < 2 ? 0.5f * static_cast<float>(magnitude) : __uint_as_float((magnitude + 252) << 22);
  return code & 8 ? -value : value;
}

// Eight values, the first in the lowest 4 bits, as pairs of halves 2^14 too small: the bits of a value are the sign,
// the exponent's last two bits and the first of the mantissa of a half. pairs[i] has values i and i + 4.
constexpr float kE2m1HalvesFactor = 0x1p14f;
FI_DEVICE void e2m1_halves(unsigned codes, unsigned (&pairs)[4]) {
  // The upper bytes of halves: of the values of odd and of even index.
  const unsigned odd = (codes & 0x80808080u) | ((codes & 0x70707070u) >> 3);
  const unsigned even = ((codes << 4) & 0x80808080u) | ((codes & 0x07070707u) << 1);
  pairs[0] = __byte_perm(even, 0, 0x2404), pairs[1] = __byte_perm(odd, 0, 0x2404);
  pairs[2] = even & 0xff00ff00u, pairs[3] = odd & 0xff00ff00u;
}

// The codes of the magnitudes of eight floats, rounded to nearest even and saturated, the first in the lowest 4 bits;
// NaN becomes 6.
// The code of a is the smallest of round(2 a), round(a) + 2 and round(a / 2) + 4, because e2m1 has steps of 1/2 up to
// 2, of 1 up to 4 and of 2 up to 6. Each term is one addition of 2^23, whose last bit is worth 1: the sum rounds to
// nearest even and holds the code in its lowest bits. Seven instructions an element, four of them in the FMA pipe.
FI_DEVICE uint32_t e2m1_magnitudes(const float (&x)[8]) {
  constexpr float aligner = 0x1p23f;
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = fminf(fabsf(x[i]), 6.f);
    const float sum = fminf(fminf(fmaf(a, 2.f, aligner), a + (aligner + 2.f)), fmaf(a, 0.5f, aligner + 4.f));
    codes += __float_as_uint(sum) << (4 * i);
  }
  return codes - 0xfb000000u;  // the sum of the shifted bits of 2^23
}

FI_DEVICE uint32_t sign_bit(float x) { return __float_as_uint(x) >> 31; }
FI_DEVICE uint32_t sign_bit(__nv_fp8_e4m3 x) { return x.__x >> 7; }

// The signs of eight 16-bit floats, at the places of the signs of their codes.
FI_DEVICE uint32_t e2m1_signs(const uint32_t (&pairs)[4]) {
  const uint32_t low = __byte_perm(pairs[0], pairs[1], 0x7531), high = __byte_perm(pairs[2], pairs[3], 0x7531);
  uint32_t even, odd;  // a selector with bit 3 set replicates the sign of a byte, which __byte_perm cannot
  asm("prmt.b32 %0, %1, %2, 0xeca8;" : "=r"(even) : "r"(low), "r"(high));
  asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(odd) : "r"(low), "r"(high));
  return (even & 0x08080808u) | (odd & 0x80808080u);
}

}  // namespace fi
