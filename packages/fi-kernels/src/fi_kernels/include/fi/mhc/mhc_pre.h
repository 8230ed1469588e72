// Parameters of mhc_pre, shared by launcher and device code.
#pragma once
#include "fi/mhc/mhc_post.h"

namespace fi {

constexpr int kMhcLogits = kMhcStreams * (kMhcStreams + 2);  // of a token: pre, post, and comb row by row

// Of the logits l of a token, which are the sum of its splits divided by the RMS of its streams, times scale, plus
// base: pre = sigmoid(l) + pre_eps, post = sigmoid(l) post_factor, comb = Sinkhorn(l); layer_input is the sum of the
// streams times pre. Strides are in elements; the innermost stride is 1.
struct MhcPreParams {
  float* post;           // [tokens, 4], contiguous
  float* comb;           // [tokens, 4, 4], contiguous
  void* layer_input;     // [tokens, h]
  const float* logits;   // [splits, tokens, 24], contiguous
  const float* squares;  // [splits, tokens], contiguous; null: of the residual itself
  const void* residual;  // [tokens, 4, h]
  const float* scale;    // [3]: of pre, post, comb
  const float* base;     // [24]
  int64_t input_token, residual_token, residual_stream, tokens;
  int32_t splits, h, repeat;
  float inv_k, rms_eps, pre_eps, sinkhorn_eps, post_factor;
};

}  // namespace fi
