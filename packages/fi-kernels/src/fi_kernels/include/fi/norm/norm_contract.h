// Checks that the norm operators share: the output tensor, its fp8 scale, and the sizes that the kernels index.
#pragma once
#include "fi/host/op.h"

namespace fi {

// Returns true if out is fp8, which needs a scale. Any other out has the dtype of input, and no scale.
inline bool check_norm_output(const Tensor& out, const Tensor& input, const OptionalTensor& scale) {
  out.on(input).inner_contiguous();
  if (out.dtype().bits != 8) {
    FI_CHECK(!scale, TypeError, "out must be float8_e4m3fn or float8_e5m2 with a scale; got %s",
             out.dtype().str().c_str());
    out.like(input);
    return false;
  }
  out.is({kE4M3, kE5M2});
  FI_CHECK(scale, TypeError, "scale must be a float32 tensor with one element when out is fp8; got None");
  scale.is({kF32}).on(input);
  FI_CHECK(scale.ndim() <= 1 && scale.numel() == 1, ValueError, "scale must have shape [] or [1]; got %s",
           scale.shape_str().c_str());
  return true;
}

inline void check_norm_size(const Tensor& input, int64_t rows, int64_t d) {
  FI_CHECK(d <= 1 << 30 && rows <= 0x7fffffff, ValueError,
           "input must have d <= 2^30 and fewer than 2^31 rows; got shape %s", input.shape_str().c_str());
}

}  // namespace fi
