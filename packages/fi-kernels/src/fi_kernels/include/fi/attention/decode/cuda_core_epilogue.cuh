// The epilogue of decode on CUDA cores: the built-in one, or that of a user's variant, which transforms the output.
#pragma once
#include "fi/attention/decode/split_kv_epilogue.cuh"
#include "fi/attention/variant.h"

namespace fi {

struct CudaCoreEpilogue : DecodeEpilogue {
  Variant& variant;

  FI_DEVICE CudaCoreEpilogue(const BatchDecodeParams& params, const DecodeWorkTile& s, Variant& variant)
      : DecodeEpilogue(params, s, params.problem.head_dim_vo), variant(variant) {}

  // Element x .. x + 3 of row r, over all keys.
  FI_DEVICE void write(int r, int x, PartialOutput partial) const {
    if constexpr (!Variant::kCustom) {
      DecodeEpilogue::write(r, x, partial);
    } else {
      const AttentionProblem& p = params.problem;
      const Row row = params.row(kv_head, first + r);
      const int64_t token = params.first_token(s.request) + row.i;
      const float scale = p.value_scale(kv_head) * (params.scales.bmm2 ? *params.scales.bmm2 : 1.f);
      const auto output = variant.end(row, partial.row_max, partial.row_sum, scale);
      const float4 y = make_float4(output(partial.output.x), output(partial.output.y), output(partial.output.z),
                                   output(partial.output.w));
      store_four(p.out, p.out_type, token * p.out_token + row.head * p.out_head + x, y, params.out_aligned);
      if (p.lse && x == 0)
        p.lse[token * p.qo_heads + row.head] = softmax_lse<CudaMath>(partial.row_max, partial.row_sum);
    }
  }

  // Of the kv head of row r, and the rows up to its last, where a q tile has several.
  FI_DEVICE CudaCoreEpilogue of_row(int r) const {
    CudaCoreEpilogue found = *this;
    if (params.heads_per_tile > 1) {
      const int head = head_of(r);
      found.select_head(head);
      found.rows = (head + 1) * params.problem.group();
    }
    return found;
  }

  // Merges the splits in the last CTA to arrive. All rows of this split are stored. kHeads: a q tile may have several
  // kv heads.
  template <bool kHeads, class Threads>
  FI_DEVICE void merge_splits(Threads threads) const {
    merge(threads, [&](int r, int x, const PartialOutput& values) {
      if constexpr (kHeads)
        of_row(r).write(r, x, values);
      else
        write(r, x, values);
    });
  }
};

}  // namespace fi
