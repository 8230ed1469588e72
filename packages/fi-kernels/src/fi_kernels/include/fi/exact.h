// Bits of floats, and random numbers, the same on every device.
#pragma once
#include "fi/types.h"

// Inlined into each clone of a CPU worker (see fi/cpu/target.h) and into kernels.
#if defined(__CUDACC__)
#define FI_EXACT __host__ __device__ __forceinline__
#else
#define FI_EXACT inline __attribute__((always_inline))
#endif

namespace fi {

#if defined(__CUDA_ARCH__)
FI_EXACT uint32_t bits_of(float x) { return __float_as_uint(x); }
FI_EXACT float from_bits(uint32_t x) { return __uint_as_float(x); }
#else
FI_EXACT uint32_t bits_of(float x) {
  uint32_t y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
FI_EXACT float from_bits(uint32_t x) {
  float y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
#endif

// Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 128 random bits of a counter.
struct Random {
  uint32_t x[4];
};
FI_EXACT Random philox(uint64_t seed, uint64_t offset, uint64_t subsequence, int rounds = 10) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(offset), c1 = static_cast<uint32_t>(offset >> 32);
  uint32_t c2 = static_cast<uint32_t>(subsequence), c3 = static_cast<uint32_t>(subsequence >> 32);
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c0 = n0, c1 = static_cast<uint32_t>(b), c2 = n2, c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace fi
