// Gated activations on sm_80 and later: threads index the vectors of all rows, so CTAs are full for any h.
#pragma once
#include "fi/activation/act_and_mul.h"
#include "fi/cuda/math.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {

// A CTA processes kNumVecs * blockDim.x neighbouring vectors. Each thread issues all its loads before it uses a value.
template <class T, Activation kAct, int kVec, int kNumVecs>
FI_DEVICE void act_and_mul(const ActAndMulParams& p) {
  Vec<T, kVec> gate[kNumVecs], up[kNumVecs];
  T* out[kNumVecs];
  const uint32_t first = blockIdx.x * blockDim.x * kNumVecs + threadIdx.x;
  pdl_wait();
#pragma unroll
  for (int k = 0; k < kNumVecs; ++k) {
    const uint32_t index = first + k * blockDim.x;
    const uint32_t row = divide(index, p.vectors_per_row);
    const int64_t column = static_cast<int64_t>(index - row * p.vectors_per_row.value) * kVec;
    out[k] = index < p.vectors ? static_cast<T*>(p.out) + row * p.out_row_stride + column : nullptr;
    if (index < p.vectors) {
      const T* input = static_cast<const T*>(p.input) + row * p.input_row_stride + column;
      gate[k] = load<T, kVec>(input);
      up[k] = load<T, kVec>(input + p.h);
    }
  }
  pdl_launch_dependents();
#pragma unroll
  for (int k = 0; k < kNumVecs; ++k) {
    if (first + k * blockDim.x >= p.vectors) break;
    float x[kVec], y[kVec];
    to_float(gate[k], x);
    to_float(up[k], y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] *= activate<CudaMath, kAct, sizeof(T) == 4>(x[i]);
    Vec<T, kVec> out_vec;
    from_float(y, out_vec);
    store(out[k], out_vec);
  }
}

}  // namespace fi
