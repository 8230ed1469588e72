// Parameters of mhc_post, shared by launcher and device code.
#pragma once
#include "fi/types.h"

namespace fi {

constexpr int kMhcStreams = 4;

// out[t, n, i] = x[t, i] post[t, n] + sum over o of residual[t, o, i] comb[t, o, n]. Strides are in elements; the
// innermost stride is 1.
struct MhcPostParams {
  void* out;             // [tokens, 4, h]
  const void* x;         // [tokens, h]
  const void* residual;  // [tokens, 4, h]
  const float* post;     // [tokens, 4], contiguous
  const float* comb;     // [tokens, 4, 4], contiguous
  int64_t x_token, residual_token, residual_stream, out_token, out_stream;
  int32_t h;
};

}  // namespace fi
