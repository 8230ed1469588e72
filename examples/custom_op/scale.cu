// The kernel of scale: one element a thread.
#include "scale.h"

extern "C" __global__ void __launch_bounds__(256) scale(const __grid_constant__ ScaleParams p) {
  const fi::int64_t i = static_cast<fi::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.n) p.out[i] = p.a * p.x[i];
}
