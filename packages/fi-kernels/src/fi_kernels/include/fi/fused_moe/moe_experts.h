// Parameters of the Hopper kernel of a fused MoE for few tokens an expert, shared by launcher and device code.
#pragma once
#include "fi/fused_moe/expert_activation.h"
#include "fi/tensor_map.h"
#include "fi/types.h"

namespace fi {

// Most passes of a launch: an expert takes one for each `tokens of a tile` rows, so there are at most experts + rows /
// tokens.
constexpr int32_t kMaxExpertPasses = 640, kMaxExperts = 512;
constexpr int32_t kMaxSlots = 64, kMostSortedTokens = 16;  // slots that CTAs sort by themselves, in tiles of so many
// Features that have one counter of finished passes; their counters follow those of kMaxSlots passes.
constexpr int32_t kSummedFeatures = 16;

// The rows of a weight in blocks of 8: `step` blocks alternate, so block b has features b % step, b % step + step .. of
// 8 * step neighbours. paired: the 8 rows of gate of the same features follow each block of up.
struct RowOrder {
  int32_t step, paired;
};
// Of weights shuffled for an epilogue tile of so many rows (shuffle_matrix_a); 0: in order. Gated weights for 128 are
// those of reorder_rows_for_gated_act_gemm.
FI_HOST_DEVICE RowOrder row_order(int64_t tile, bool gated) {
  if (tile == 0) return {1, 0};
  if (tile == 64) return {2, 0};
  return gated ? RowOrder{2, 1} : RowOrder{4, 0};
}
FI_HOST_DEVICE int32_t feature_of_row(int32_t row, int32_t step) {
  return row / (8 * step) * (8 * step) + row % 8 * step + row / 8 % step;
}
// half: 1 for the gate.
FI_HOST_DEVICE int64_t row_of_feature(RowOrder order, int64_t feature, int64_t half, int64_t features) {
  const int64_t s = order.step, row = feature / (8 * s) * (8 * s) + feature % s * 8 + feature / s % 8;
  return order.paired ? row / 8 * 16 + half * 8 + row % 8 : half * features + row;
}

// A grouped product. For each row r of an expert e and its input i = in[source[r]]:
//   activated and gated: out[r, f] = activation(i . weights[e, f] + bias[e, f], i . weights[e, features + f] + bias)
//   activated:           out[r, f] = activation(i . weights[e, f] + bias[e, f])
//   neither:             out[r, f] = i . weights[e, f]
struct ExpertGemm {
  // [expert, f / 8, half, f % 8, k] in boxes of 128 bytes: of gated weights, 8 rows of up and the 8 rows of gate of the
  // same features lie beside each other in a tile. Not gated: one half. k_apart: [expert * k_blocks + block, ..].
  TensorMap weights;
  void* out;              // [rows, features]
  const void* in;         // [.., k]
  const int32_t* source;  // [rows]: the row of `in` that a row reads; null: the same row
  // fp32 [experts, weight rows / 128, k / 128]; mxfp4: ue8m0 [experts, weight rows, k / 32]; null: none.
  const void* weight_scale;
  const void* bias;  // [experts, weight rows], of the type of `in`, or null
  int64_t in_row_stride, out_row_stride, bias_row_stride;
  int64_t weight_scale_expert_stride, weight_scale_row_stride;
  int32_t features, k, k_blocks;  // k_blocks: of 128 bytes of weights
  int32_t k_apart;                // whether these are apart: [experts, k_blocks, weight rows, 128 bytes]
  int32_t gated, activated;
  RowOrder order;
};

// Slots t * top_k + j that CTAs sort by themselves; then the experts of each token are summed too:
// sum[t] = sum over j, in order, of weights[t, j] (out[row of the slot] + bias[expert]).
struct ExpertSlots {
  const int32_t* ids;    // [count], all experts; null: sorted before, not summed
  const float* weights;  // [count]; null: ones
  void* sum;             // [count / top_k, features], of the type of out
  const void* bias;      // [experts, features] of that type; null: none
  int64_t sum_row_stride, bias_row_stride;
  int32_t count, top_k, first_expert;
};

// One product, or two of which the second reads the rows that the first writes.
struct ExpertGemmParams {
  ExpertGemm gemm[2];
  const int32_t* offsets;  // [experts + 1]: first row of each expert; not read with slots.ids
  ExpertSlots slots;
  // [1 + passes], zeros before the launch: tiles that CTAs have claimed, and finished warps of the first product for
  // each pass. Null: CTAs take tiles in turn; only for one product.
  int32_t* progress;
  // [rows, features], gated [rows, 2 features], of the type of `in`, features in order and those of the gate first: is
  // added before the activation. Null: none.
  const void* delta;
  int64_t delta_row_stride;
  const float* alpha;  // [experts]; null: the constant, as of the next two
  const float* beta;
  const float* limit;
  ExpertConstants constants;
  int32_t products, experts;
  int32_t weights_once;  // no weight is loaded twice: L2 evicts it first
  int32_t ready;         // offsets and progress were complete before the kernel ahead in the stream began
};

}  // namespace fi
