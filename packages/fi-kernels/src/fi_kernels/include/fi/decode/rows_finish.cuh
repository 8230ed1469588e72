// The end of a segment of decode on CUDA cores: the built-in one, or a variant's, whose output is its own.
#pragma once
#include "fi/attention/variant.h"
#include "fi/decode/finish.cuh"

namespace fi {

struct RowsFinish : Finish {
  Variant& variant;

  FI_DEVICE RowsFinish(const BatchDecodeParams& params, const DecodeSegment& s, Variant& variant)
      : Finish(params, s), variant(variant) {}

  // Element x .. x + 3 of row r, over all keys.
  FI_DEVICE void write(int r, int x, RowPart part) const {
    if constexpr (!Variant::kCustom) {
      Finish::write(r, x, part);
    } else {
      const AttentionProblem& p = params.problem;
      const Row row = params.row(kv_head, first + r);
      const int64_t token = static_cast<int64_t>(s.request) * p.mask.qo_len + row.i;
      const float scale = p.value_scale(kv_head) * (params.bmm2_scale ? *params.bmm2_scale : 1.f);
      const auto output = variant.end(row, part.m, part.d, scale);
      const float4 y = make_float4(output(part.x.x), output(part.x.y), output(part.x.z), output(part.x.w));
      store_four(p.out, p.out_type, token * p.out_token + row.head * p.out_head + x, y, params.out_aligned);
      if (p.lse && x == 0) p.lse[token * p.qo_heads + row.head] = softmax_lse<CudaMath>(part.m, part.d);
    }
  }

  // What comes after all rows of a part were published, by all threads, which meet at `barrier`; `last` is in shared
  // memory.
  FI_DEVICE void complete(int thread, int threads, int barrier, int* last) const {
    if (!arrive(thread, threads, barrier, last)) return;
    if constexpr (!Variant::kCustom) {
      write_merged(thread, threads);
    } else {
      const int width = params.problem.dim_vo / 4;
#pragma unroll 1
      for (int at = thread; at < rows * width; at += threads)
        write(at / width, at % width * 4, merged(at / width, at % width * 4));
    }
  }

 private:
  FI_DEVICE RowPart merged(int r, int x) const {
    RowPart sum{Variant::kHidden, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll 4
    for (int part = 0; part < s.parts; ++part) {
      const int slot = s.slot_of(part);
      const float2 state = __ldcg(reinterpret_cast<const float2*>(params.slot_state(slot)) + r);
      const float4 v = __ldcg(reinterpret_cast<const float4*>(params.slot(slot) + r * params.problem.dim_vo + x));
      const float top = fmaxf(sum.m, state.x), base = softmax_base(top);
      const float old = softmax_weight<CudaMath>(sum.m, base), weight = softmax_weight<CudaMath>(state.x, base);
      sum.m = top;
      sum.d = sum.d * old + weight * state.y;
      sum.x = make_float4(sum.x.x * old + weight * v.x, sum.x.y * old + weight * v.y, sum.x.z * old + weight * v.z,
                          sum.x.w * old + weight * v.w);
    }
    return sum;
  }
};

}  // namespace fi
