// One request's attention as kernels see it: tensors, heads, and what happens to scores; shared by device and CPU code.
#pragma once
#include "fi/attention/mask.h"
#include "fi/attention/rotary.h"
#include "fi/attention/scores.h"
#include "fi/divisor.h"
#include "fi/types.h"

namespace fi {

enum class OutType : int32_t { kF16, kBF16, kF32, kE4M3, kE5M2 };
FI_HOST_DEVICE int32_t out_bytes(OutType type) {
  return type == OutType::kF32 ? 4 : type == OutType::kF16 || type == OutType::kBF16 ? 2 : 1;
}

// A query row of one head. Rows of the heads that share a kv head are packed, r = i * group + g, so that a tile of them
// reads each key once and, in a causal mask, sees a growing range of keys.
struct Row {
  int32_t i, head;
};

// The scales of NVFP4 keys and values, e4m3: one for each 16 elements of a row. Strides in bytes.
struct KvScales {
  const uint8_t* k;  // [kv_len, kv_heads, head_dim_qk / 16]
  const uint8_t* v;  // [kv_len, kv_heads, head_dim_vo / 16]
  int64_t k_page, k_token, k_head, v_page, v_token, v_head;
};

// Strides in elements; the innermost is 1. NVFP4 keys and values, two elements a byte: in bytes.
struct AttentionProblem {
  const void* q;         // [qo_len, qo_heads, head_dim_qk]
  const void* k;         // [kv_len, kv_heads, head_dim_qk]
  const void* v;         // [kv_len, kv_heads, head_dim_vo]
  void* out;             // [qo_len, qo_heads, head_dim_vo]
  float* lse;            // [qo_len, qo_heads] contiguous; null: not wanted
  const float* scale_q;  // [qo_heads]; null: ones
  const float* scale_k;  // [kv_heads]; null: ones
  const float* scale_v;  // [kv_heads]; null: ones
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;
  int32_t qo_heads, kv_heads, head_dim_qk, head_dim_vo;
  Divisor group_size;  // query heads of a kv head
  OutType out_type;
  int32_t aligned;  // rows of q, k and v begin at multiples of 16 bytes, or of 8 if 8 elements are no more
  float out_scale;
  Mask mask;
  Scores scores;
  Rotary rotary;
  KvScales kv_scales;  // of NVFP4

  FI_HOST_DEVICE int32_t group() const { return static_cast<int32_t>(group_size.value); }
  FI_HOST_DEVICE int32_t rows() const { return mask.qo_len * group(); }  // packed rows of one kv head
  FI_HOST_DEVICE Row row(int32_t kv_head, int32_t r) const {
    const auto i = static_cast<int32_t>(divide(static_cast<uint32_t>(r), group_size));
    return {i, kv_head * group() + (r - i * group())};
  }
  template <class Math>
  FI_HOST_DEVICE HeadScores head_scores(int32_t head) const {
    const float dequant = (scale_q ? scale_q[head] : 1.f) * (scale_k ? scale_k[head / group()] : 1.f);
    return scores.of_head<Math>(head, qo_heads, dequant);
  }
  // Whether single scores need more than a scale and a range of keys.
  FI_HOST_DEVICE bool special() const { return scores.soft_cap > 0.f || scores.alibi || mask.selects(); }
  FI_HOST_DEVICE float value_scale(int32_t kv_head) const { return out_scale * (scale_v ? scale_v[kv_head] : 1.f); }
};

}  // namespace fi
