// A row in the registers of some threads: how its elements are dealt, loaded and summed.
#pragma once
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {

// Thread `lane` of the `threads` that share a row of d elements has the vectors at(0), at(1), ... of kVec elements.
template <int kVec>
struct Deal {
  int lane, threads, d;
  FI_DEVICE int at(int k) const { return (k * threads + lane) * kVec; }
  FI_DEVICE bool has(int k) const { return at(k) < d; }
};

// All loads are issued before any is used: the bytes in flight are what bandwidth is made of.
template <class T, int kVec, int kCount>
FI_DEVICE void load_row(const T* row, const Deal<kVec>& deal, Vec<T, kVec> (&x)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k)
    if (deal.has(k)) x[k] = load<T, kVec>(row + deal.at(k));
}

// Makes the compiler take the values as new, without an instruction.
template <class T, int kVec, int kCount>
FI_DEVICE void forget_values(Vec<T, kVec> (&x)[kCount]) {
  if constexpr (sizeof(x[0]) % 4 == 0) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      uint32_t words[sizeof(x[0]) / 4];
      memcpy(words, &x[k], sizeof x[0]);
#pragma unroll
      for (uint32_t& word : words) asm volatile("" : "+r"(word));
      memcpy(&x[k], words, sizeof x[0]);
    }
  }
}

// kVec floats, of which a load moves four at most.
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

// What quantised outputs are multiplied by: scale is that of dequantisation.
template <class O>
FI_DEVICE float inverse_scale(const float* scale) {
  if constexpr (kIsFp8<O>) return 1.f / *scale;
  return 1.f;
}

}  // namespace fi
