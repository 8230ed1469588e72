// Parameters of the kernel that computes a MoE layer of few tokens in one launch, shared by launcher and device code.
#pragma once
#include "fi/fused_moe/expert_activation.h"
#include "fi/types.h"

namespace fi {

constexpr int32_t kFewTokens = 8;  // columns of an mma
constexpr int32_t kFewSlots = 64;  // a slot is a token and one of its experts
constexpr int32_t kFewTopK = 32;   // a lane has a slot of the only token
constexpr int32_t kFewExperts = 1024;
constexpr int32_t kFewWarps = 16;     // of a CTA
constexpr int32_t kFewFeatures = 64;  // of a work tile of the first product
constexpr int32_t kLineBytes = 128;   // of a row of weights: what a warp multiplies at a time

// Bytes of shared memory of a token with `lines` lines of 16-bit values, of which a line has `k`. The padding puts the
// tokens that lanes read together into different banks.
FI_HOST_DEVICE int32_t few_tokens_pitch(int32_t lines, int32_t k, bool quantized) {
  return lines * k * 2 + (quantized ? 16 : 64);
}

// One of the two products: the weights of an expert times the rows of its tokens.
struct FewTokensProduct {
  const char* weight;  // [experts, rows, k]
  const float* scale;  // [experts, rows / 128, k / 128] of e4m3 weights; null: none
  const void* bias;    // [experts, rows] of the type of tokens; null: none
  int64_t expert_bytes, row_bytes;
  int64_t scale_expert_stride, bias_row_stride;
  int32_t scale_row_stride;
  int32_t lines;  // of a row of weights
  int32_t pitch;  // bytes of a token in shared memory
};

// out[t] = sum over j of weights[t, j] (down[e] . activation(up[e] . x[t] + bias) + bias), e = ids[t, j].
struct MoeFewTokensParams {
  const void* x;              // [tokens, hidden]
  const int32_t* ids;         // [tokens, top_k], all experts
  const float* weights;       // [tokens, top_k]; null: ones
  void* out;                  // [tokens, hidden]
  void* activated;            // [tokens * top_k, width]
  const void* delta;          // [tokens * top_k, 2 width], the gate's first: is added before the activation. Null: none
  FewTokensProduct up, down;  // up has the rows of the linear projection, then those of the gate
  const float* alpha;         // [experts]; null: the constant, as of the next two
  const float* beta;
  const float* limit;
  ExpertConstants constants;
  int64_t x_row_stride, out_row_stride, delta_row_stride;
  int32_t tokens, top_k, hidden, width, experts, first_expert;
  // A work tile of the first product has `features` features of an expert, in units of at most 8, each of `k_warps`
  // warps that share k. One of the second product has `rows` rows of all experts.
  int32_t features, unit, k_warps, rows;
  int32_t feature_tiles, row_tiles;
};

}  // namespace fi
