// What the attention ops ask of their arguments alike, and how arguments become parts of the problem.
#pragma once
#include <algorithm>
#include <cmath>

#include "fi/attention/problem.h"
#include "fi/host/op.h"

namespace fi {

enum PosEncoding { kRopeOnTheFly = 1, kAlibi = 2 };

inline Rotary rotary(int64_t dim, double scale, double theta) {
  Rotary r{1, {}};
  for (int i = 0; i < RopeFrequencies::kPowers; ++i)
    r.frequencies.power[i] = std::pow(theta, -2.0 * (1 << i) / static_cast<double>(dim));
  r.frequencies.inverse_scale = 1 / scale;
  return r;
}

inline OutType out_type(DType d) {
  if (d == kF16) return OutType::kF16;
  if (d == kBF16) return OutType::kBF16;
  if (d == kF32) return OutType::kF32;
  return d == kE4M3 ? OutType::kE4M3 : OutType::kE5M2;
}

inline const float* factors(const OptionalTensor& scale, const Tensor& q, Dim& heads) {
  if (!scale) return nullptr;
  scale.is({kF32}).on(q).contiguous().shape(heads);
  return scale.data<float>();
}

inline const float* scalar(const OptionalTensor& x, const Tensor& q) {
  if (!x) return nullptr;
  FI_CHECK(x.is({kF32}).on(q).numel() == 1, ValueError, "%s must have one element; got %s", x.name(),
           x.shape_str().c_str());
  return x.data<const float>();
}

inline void check_head_dim(const Tensor& t, int64_t dim) {
  FI_CHECK(dim >= 8 && dim <= 512 && dim % 8 == 0, ValueError,
           "Unsupported head_dim: the last dimension of %s must be a multiple of 8 up to 512; got %lld", t.name(),
           static_cast<long long>(dim));
}

inline void check_dtypes(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
  q.is({kF16, kBF16, kF32, kE4M3, kE5M2});
  k.on(q);
  const bool wide = k.dtype().bits == 8 && q.dtype().bits == 16 && k.dtype().code != kDLInt;
  if (!wide) k.like(q);
  k.is({kF16, kBF16, kF32, kE4M3, kE5M2});
  v.like(k);
  out.is({kF16, kBF16, kF32, kE4M3, kE5M2}).on(q);
}

}  // namespace fi
