// One row held in registers: which vectors a thread owns, how they are loaded, and the scale of an fp8 output.
#pragma once
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {

// The vectors of kVec elements that one thread owns in a row of d elements: vector k starts at element offset(k).
// `threads` threads share the row; neighbouring threads own neighbouring vectors, so each load is coalesced.
template <int kVec>
struct ThreadVectors {
  int lane, threads, d;
  FI_DEVICE int offset(int k) const { return (k * threads + lane) * kVec; }
  FI_DEVICE bool inside(int k) const { return offset(k) < d; }
};

// Issues all loads before any value is used, because bandwidth follows from the bytes in flight.
template <class T, int kVec, int kNumVecs>
FI_DEVICE void load_row(const T* row, const ThreadVectors<kVec>& vectors, Vec<T, kVec> (&x)[kNumVecs]) {
#pragma unroll
  for (int k = 0; k < kNumVecs; ++k)
    if (vectors.inside(k)) x[k] = load<T, kVec>(row + vectors.offset(k));
}

// Optimization barrier: the compiler treats the values as unknown from here on. It emits no instruction.
template <class T, int kVec, int kNumVecs>
FI_DEVICE void optimization_barrier(Vec<T, kVec> (&x)[kNumVecs]) {
  if constexpr (sizeof(x[0]) % 4 == 0) {
#pragma unroll
    for (int k = 0; k < kNumVecs; ++k) {
      uint32_t words[sizeof(x[0]) / 4];
      memcpy(words, &x[k], sizeof x[0]);
#pragma unroll
      for (uint32_t& word : words) asm volatile("" : "+r"(word));
      memcpy(&x[k], words, sizeof x[0]);
    }
  }
}

// Loads kVec floats with loads of at most four floats (16 bytes).
template <int kVec>
FI_DEVICE void load_floats(const float* p, float (&f)[kVec]) {
  constexpr int kStep = kVec < 4 ? kVec : 4;
#pragma unroll
  for (int i = 0; i < kVec; i += kStep) {
    const Vec<float, kStep> x = load<float, kStep>(p + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) f[i + j] = x.v[j];
  }
}

// The factor that quantizes an output of type O: 1 / *scale for fp8, where *scale is the dequantization scale.
template <class O>
FI_DEVICE float quant_factor(const float* scale) {
  if constexpr (kIsFp8<O>) return 1.f / *scale;
  return 1.f;
}

}  // namespace fi
