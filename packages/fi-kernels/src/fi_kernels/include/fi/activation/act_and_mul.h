// Parameters of the gated activations, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// out[row, i] = act(input[row, i]) * input[row, h + i]. Strides in elements; the innermost is 1.
struct ActAndMulParams {
  void* out;          // [rows, h]
  const void* input;  // [rows, 2 h]
  int64_t out_row, input_row;
  int64_t h;
  uint32_t vectors;  // rows * h / (elements a vector)
  Divisor vectors_a_row;
};

// log2(Q(a)) for a >= 0, Q(a) = erfc(a / sqrt(2)) / 2: nearly a parabola, so that this and one power of two cost a
// third of erf. gelu(x) = max(x, 0) - |x| Q(|x|), with no cancellation. Minimax on [0, 6], error of Q 3e-6 relative:
// for 16-bit types; beyond 6 it falls to -inf as log2(Q) does.
FI_HOST_DEVICE float log2_gelu_tail(float a) {
  float p = -1.83481097e-06f;
  p = p * a + 6.15982863e-05f;
  p = p * a - 9.3052478e-04f;
  p = p * a + 8.50789063e-03f;
  p = p * a - 5.396007e-02f;
  p = p * a - 4.58464384e-01f;
  p = p * a - 1.15125108f;
  return p * a - 9.99995291e-01f;
}

}  // namespace fi
