// Gated activations on sm_80 and later: a stream of vectors, rows laid end to end so that any h fills the blocks.
#pragma once
#include "fi/activation/act_and_mul.h"
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {

// x / (1 + e^-argument). The floor keeps -inf from being divided by inf: the limit is -0. NaN comes out as NaN.
FI_DEVICE float sigmoid_times(float x, float argument) {
  constexpr float kLog2e = 1.4426950408889634f;
  return __fdividef(fmaxf(x, -200.f), 1.f + exp2_approx(-kLog2e * argument));
}

template <class T, Activation kAct>
FI_DEVICE float activate(float x) {
  if constexpr (kAct == kSilu) return sigmoid_times(x, x);
  // 0.5 (1 + tanh(u)) = sigmoid(2 u), without the cancellation for x < 0.
  if constexpr (kAct == kGeluTanh) return sigmoid_times(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
  if constexpr (sizeof(T) == 2) return fmaxf(x, 0.f) - fminf(fabsf(x), 200.f) * exp2_approx(log2_gelu_tail(fabsf(x)));
  return 0.5f * fmaxf(x, -200.f) * (1.f + erff(x * 0.7071067811865476f));
}

// A block takes kCount * blockDim.x neighbouring vectors; all its loads are issued before any is used.
template <class T, Activation kAct, int kVec, int kCount>
FI_DEVICE void act_and_mul(const ActAndMulParams& p) {
  Vec<T, kVec> gate[kCount], up[kCount];
  T* out[kCount];
  const uint32_t first = blockIdx.x * blockDim.x * kCount + threadIdx.x;
  pdl_wait();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint32_t index = first + k * blockDim.x;
    const uint32_t row = divide(index, p.vectors_a_row);
    const int64_t column = static_cast<int64_t>(index - row * p.vectors_a_row.value) * kVec;
    out[k] = index < p.vectors ? static_cast<T*>(p.out) + row * p.out_row + column : nullptr;
    if (index < p.vectors) {
      const T* input = static_cast<const T*>(p.input) + row * p.input_row + column;
      gate[k] = load<T, kVec>(input);
      up[k] = load<T, kVec>(input + p.h);
    }
  }
  pdl_launch_dependents();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (first + k * blockDim.x >= p.vectors) break;
    float x[kVec], y[kVec];
    to_float(gate[k], x);
    to_float(up[k], y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] *= activate<T, kAct>(x[i]);
    Vec<T, kVec> rounded;
    from_float(y, rounded);
    store(out[k], rounded);
  }
}

}  // namespace fi
