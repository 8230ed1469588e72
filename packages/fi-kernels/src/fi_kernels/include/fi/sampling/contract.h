// Checks the seed and offset arguments that all sampling ops share: one number, or a tensor with one element per row.
#pragma once
#include "fi/host/tensor.h"
#include "fi/sampling/sample.h"

namespace fi {

inline PerRowSeed per_row_seed(const Tensor& rows, int64_t value, const Tensor& input, int64_t batch) {
  if (!rows) return {nullptr, static_cast<uint64_t>(value), 0};
  rows.is({kI64, DType{kDLUInt, 64}}).on(input).contiguous();
  FI_CHECK(rows.ndim() == 1 && (rows.size(0) == 1 || rows.size(0) == batch), ValueError,
           "%s must have shape [1] or [batch] with batch = %lld; got %s", rows.name(), static_cast<long long>(batch),
           rows.shape_str().c_str());
  return {rows.data<const uint64_t>(), 0, rows.size(0) == 1 ? 0 : 1};
}

}  // namespace fi
