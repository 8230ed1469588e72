// The epilogue of an attention row on the CPU, and the arguments of a variant.
#pragma once
#include <type_traits>

#include "fi/attention/cpu/block.h"
#include "fi/attention/extras.h"
#include "fi/attention/variant.h"
#include "fi/cpu/row_convert.h"

namespace fi {

inline const Variant::Arguments& variant_arguments(const Extras& extras) {
  const size_t bytes = std::is_empty_v<Variant::Arguments> ? 0 : sizeof(Variant::Arguments);
  FI_CHECK(extras.bytes() == bytes, TypeError, "takes %zu additional arguments; got %zu", bytes / sizeof(uint64_t),
           extras.bytes() / sizeof(uint64_t));
  return *static_cast<const Variant::Arguments*>(extras.data());
}

// Normalises a row of unnormalised output in place and writes it and its lse.
inline void store_row(const AttentionProblem& p, Variant& variant, const float* sinks, Row row, float row_max,
                      float row_sum, float* output_row, DType out) {
  const float factor = sinks ? add_sink<CpuMath>(sinks[row.head], row_max, row_sum) : 1.f;
  const auto output = variant.end(row, row_max, row_sum, factor * p.value_scale(row.head / p.group()));
  if constexpr (Variant::kCustom) {
    for (int32_t x = 0; x < p.head_dim_vo; ++x) output_row[x] = output(output_row[x]);
  } else {
    cpu::multiply_row<16>(output_row, output.factor, p.head_dim_vo);
  }
  cpu::row_storer(out)(output_row,
                       static_cast<char*>(p.out) + (row.i * p.out_token + row.head * p.out_head) * out.bytes(),
                       p.head_dim_vo);
  if (p.lse) p.lse[static_cast<int64_t>(row.i) * p.qo_heads + row.head] = softmax_lse<CpuMath>(row_max, row_sum);
}

}  // namespace fi
