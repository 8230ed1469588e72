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
  // In order of position; so many are asked for at once.
  FI_DEVICE RowPart merged(int r, int x) const {
    constexpr int kAtOnce = 16;
    RowPart sum{Variant::kHidden, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll 1
    for (int first = 0; first < s.parts; first += kAtOnce) {
      float2 state[kAtOnce];
      float4 value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int slot = s.slot_of(min(first + i, s.parts - 1));
        state[i] = __ldcg(reinterpret_cast<const float2*>(params.slot_state(slot)) + r);
        value[i] = __ldcg(reinterpret_cast<const float4*>(params.slot(slot) + r * params.problem.dim_vo + x));
      }
      float top = sum.m;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, state[i].x);
      const float base = softmax_base(top), old = softmax_weight<CudaMath>(sum.m, base);
      sum = {top, sum.d * old, make_float4(sum.x.x * old, sum.x.y * old, sum.x.z * old, sum.x.w * old)};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = first + i < s.parts ? softmax_weight<CudaMath>(state[i].x, base) : 0.f;
        sum.d += weight * state[i].y;
        sum.x.x += weight * value[i].x, sum.x.y += weight * value[i].y;
        sum.x.z += weight * value[i].z, sum.x.w += weight * value[i].w;
      }
    }
    return sum;
  }
};

}  // namespace fi
