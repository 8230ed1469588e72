// The hooks of a user's attention variant in the kernels: scores and outputs; shared by device and CPU code.
// A unit for a variant defines FI_VARIANT, a CustomVariant, before it includes a kernel; nothing else differs.
#pragma once
#include "fi/attention/problem.h"
#include "fi/attention/softmax.h"

namespace fi {

// The attention of the library itself. Kernels compute its scores inline; only the end of a row is here.
class BuiltInVariant {
 public:
  static constexpr bool kCustom = false, kSoftmax = true;
  static constexpr float kHidden = kMinusInf;  // the score of a key that is not seen

  struct Arguments {};
  struct Params {
    FI_HOST_DEVICE void set(const Arguments&, const AttentionProblem&) {}
    FI_HOST_DEVICE void set(const Arguments&, int32_t, int32_t, const Mask&) {}
  };
  // Turns an unnormalised output into the output.
  struct End {
    float factor;
    FI_HOST_DEVICE float operator()(float sum) const { return sum * factor; }
  };

  FI_HOST_DEVICE BuiltInVariant(const Params&, int32_t) {}
  FI_HOST_DEVICE float score(float product, Row, int32_t, int32_t) { return product; }
  // The output transform of a row after its last key. A variant may change row_max and row_sum, from which the lse
  // follows. scale multiplies the output.
  FI_HOST_DEVICE End end(Row, float&, float& row_sum, float scale) { return {inverse_row_sum(row_sum) * scale}; }
};

#if defined(FI_VARIANT)
using Variant = FI_VARIANT;
#else
using Variant = BuiltInVariant;
#endif

}  // namespace fi
