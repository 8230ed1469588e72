// Parameters of moe_route, shared by launcher and device code.
#pragma once
#include "fi/types.h"

namespace fi {

// The values are those of RoutingMethodType in fi_core.tllm_enums.
enum RoutingMethod : int32_t {
  kRouteDefault = 0,
  kRouteRenormalize = 1,
  kRouteDeepSeekV3 = 2,
  kRouteLlama4 = 3,
  kRouteRenormalizeNaive = 4,
  kRouteTopK = 5,
  kRouteSigmoidRenorm = 6,
  kRouteMiniMax2 = 7,
  kRouteSigmoid = 8,
  kRouteTopKSigmoid = 9,
};

// Chooses top_k of `experts` for each token by its logits; ties go to the lower number, NaN counts as -inf. Behind them
// each token gets the `shared` experts after `experts`, with weight 1.
struct MoeRouteParams {
  int32_t* ids;        // [tokens, top_k + shared], contiguous
  void* weights;       // [tokens, top_k + shared], contiguous
  int16_t* replay;     // [>= tokens, top_k], contiguous: the ids again; null: none
  const void* logits;  // [tokens, experts]
  const void* bias;    // [experts], of the type of the logits, fp32 or bf16; null: zeros
  int64_t logits_row_stride;
  int32_t tokens, experts, top_k, shared, n_group, topk_group;
  int32_t group_size, group_bits;  // experts of a group, and log2 of the lanes of a warp that share them
  int32_t vectors;                 // rows of logits, and the bias, allow loads of four elements
  int32_t bias_type;               // 0 fp32, 1 bf16, 2 fp16
  RoutingMethod method;
  int32_t normalize;  // kRouteSigmoidRenorm divides by the sum of the weights
  float scale;
};

// Whether experts are chosen by sigmoid(logit), to which the bias is added, or by the logit itself.
FI_HOST_DEVICE bool routes_by_sigmoid(RoutingMethod m) {
  return m == kRouteDeepSeekV3 || m == kRouteMiniMax2 || m == kRouteSigmoidRenorm || m == kRouteSigmoid;
}
FI_HOST_DEVICE bool routes_by_bias(RoutingMethod m) { return m == kRouteDeepSeekV3 || m == kRouteMiniMax2; }

constexpr int32_t kMostGroups = 32, kMostTopK = 32, kMostExperts = 512;

}  // namespace fi
