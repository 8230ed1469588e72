// A user's attention variant as the kernels call it; shared by device and CPU code.
#pragma once
#include "fi/attention/problem.h"
#include "fi/attention/softmax.h"
#include "fi/attention/variant_names.h"

namespace fi {

// User: a struct as variant_names.h describes it. LaunchArguments: its declared arguments, pointers and
// numbers by name, 8 bytes each.
template <class User, class LaunchArguments>
class CustomVariant {
 public:
  static constexpr bool kCustom = true, kSoftmax = User::use_softmax;
  static constexpr float kHidden = kSoftmax ? kMinusInf : 0.f;
  using Arguments = LaunchArguments;

  // `params` of the hooks: one request, that with the number batch_idx.
  struct Params : Arguments {
    uint32_t num_qo_heads, num_kv_heads, qo_len, kv_len;
    int32_t window_left;  // negative: none

    FI_HOST_DEVICE uint32_t get_qo_len(uint32_t) const { return qo_len; }
    FI_HOST_DEVICE uint32_t get_kv_len(uint32_t) const { return kv_len; }
    FI_HOST_DEVICE void set(const Arguments& arguments, const AttentionProblem& p) {
      set(arguments, p.qo_heads, p.kv_heads, p.mask);
    }
    FI_HOST_DEVICE void set(const Arguments& arguments, int32_t qo_heads, int32_t kv_heads, const Mask& mask) {
      static_cast<Arguments&>(*this) = arguments;
      num_qo_heads = static_cast<uint32_t>(qo_heads), num_kv_heads = static_cast<uint32_t>(kv_heads);
      qo_len = static_cast<uint32_t>(mask.qo_len), kv_len = static_cast<uint32_t>(mask.kv_len);
      window_left = mask.window_left;
    }
  };
  struct End {
    CustomVariant& variant;
    Row row;
    float row_max, row_sum, factor, scale;
    FI_VARIANT_CODE float operator()(float sum) const {
      return variant.user_.OutputTransform(variant.params_, sum, variant.request_, static_cast<uint32_t>(row.i),
                                           static_cast<uint32_t>(row.head), row_max, row_sum, factor) *
             scale;
    }
  };

  FI_VARIANT_CODE CustomVariant(const Params& params, int32_t request)
      : params_(params), user_(params, static_cast<uint32_t>(request), nullptr), request_(request) {}

  // The score of key j in base 2, from the product q k; without a softmax the factor of its value.
  FI_VARIANT_CODE float score(float product, Row row, int32_t kv_head, int32_t j) {
    const auto i = static_cast<uint32_t>(row.i), key = static_cast<uint32_t>(j), head = static_cast<uint32_t>(row.head),
               group = static_cast<uint32_t>(kv_head);
    const float logit = user_.LogitsTransform(params_, product, request_, i, key, head, group);
    const bool seen = user_.LogitsMask(params_, request_, i, key, head, group);
    if constexpr (kSoftmax)
      return seen ? logit * user_.sm_scale_log2 : kHidden;
    else
      return seen ? logit : kHidden;
  }

  FI_VARIANT_CODE End end(Row row, float& row_max, float& row_sum, float scale) {
    if constexpr (!kSoftmax) row_max = 0.f, row_sum = 1.f;
    float factor = 1.f;
    user_.update_m_d(params_, 0u, static_cast<uint32_t>(row.head), row_max, row_sum, factor);
    return {*this, row, row_max, row_sum, factor, scale};
  }

 private:
  const Params& params_;
  User user_;
  uint32_t request_;
};

}  // namespace fi
