// The end of a part of an item: written out if it is whole, else left in its slot, and merged by the last to arrive.
#pragma once
#include "fi/attention/eight.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/barrier.cuh"
#include "fi/decode/batch_decode.h"

namespace fi {

// The softmax state of a row, and four of its values.
struct RowPart {
  float m, d;
  float4 x;
};

// The writes of one segment: rows of its tile, by all `threads` threads that call.
struct Finish {
  const BatchDecodeParams& params;
  const DecodeSegment& s;
  int kv_head, first, rows;  // packed rows of the tile

  FI_DEVICE Finish(const BatchDecodeParams& params, const DecodeSegment& s)
      : params(params),
        s(s),
        kv_head(params.kv_head(s.unit)),
        first(params.first_row(s.unit)),
        rows(min(kDecodeRows, params.problem.rows() - first)) {}

  // Element x .. x + 3 of row r, over all keys.
  FI_DEVICE void write(int r, int x, RowPart part) const {
    const AttentionProblem& p = params.problem;
    const Row row = params.row(kv_head, first + r);
    const int64_t token = static_cast<int64_t>(s.request) * p.mask.qo_len + row.i;
    float factor = 1.f;
    if (params.sinks) factor = add_sink<CudaMath>(params.sinks[row.head], part.m, part.d);
    factor *= softmax_inverse(part.d) * p.value_scale(kv_head) * (params.bmm2_scale ? *params.bmm2_scale : 1.f);
    part.x.x *= factor, part.x.y *= factor, part.x.z *= factor, part.x.w *= factor;
    store_four(p.out, p.out_type, token * p.out_token + row.head * p.out_head + x, part.x, params.out_aligned);
    if (p.lse && x == 0) p.lse[token * p.qo_heads + row.head] = softmax_lse<CudaMath>(part.m, part.d);
  }

  FI_DEVICE void publish(int r, int x, const RowPart& part) const {
    const int slot = s.slot_of(s.part);
    store_global(params.slot(slot) + r * params.problem.dim_vo + x,
                 make_uint4(__float_as_uint(part.x.x), __float_as_uint(part.x.y), __float_as_uint(part.x.z),
                            __float_as_uint(part.x.w)));
    if (x == 0) reinterpret_cast<float2*>(params.slot_state(slot))[r] = make_float2(part.m, part.d);
  }
  // Four values of a row over the warps of the block: state(w) and values(w), unnormalised.
  template <int kWarps, class State, class Values>
  FI_DEVICE static RowPart merged_warps(State&& state, Values&& values) {
    RowPart sum{kMinusInf, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum.m = fmaxf(sum.m, state(w).x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      add(sum, softmax_weight<CudaMath>(state(w).x, softmax_base(sum.m)), state(w).y,
          *reinterpret_cast<const float4*>(values(w)));
    return sum;
  }

  // Of a part that is published: whether it is the last to arrive. By all threads, which meet at `barrier`; `last` is
  // in shared memory.
  FI_DEVICE bool arrive(int thread, int threads, int barrier, int* last) const {
    barrier_sync(barrier, threads);
    if (thread == 0) {
      int32_t* counter = params.view().counters() + s.counter();
      *last = count_device(counter) == s.parts - 1;  // by one thread for all that it met at the barrier
      if (*last) *counter = 0;                       // for the next launch
    }
    barrier_sync(barrier, threads);
    return *last;
  }

  // Everything: own(r, x) gives this part's values of a row. One place writes: the code is read from memory as data is.
  template <class Own>
  FI_DEVICE void finish(int thread, int threads, int barrier, int* last, Own&& own) const {
    const int width = params.problem.dim_vo / 4;
    bool complete = s.whole();
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (int at = thread; at < rows * width; at += threads) {
        const int r = at / width, x = at % width * 4;
        const RowPart part = complete && !s.whole() ? merged(r, x) : own(r, x);
        if (complete)
          write(r, x, part);
        else
          publish(r, x, part);
      }
      if (complete || !arrive(thread, threads, barrier, last)) return;
      complete = true;
    }
  }

  // The output of rows that other parts have left, by all that call.
  FI_DEVICE void write_merged(int thread, int threads) const {
    const int width = params.problem.dim_vo / 4;
#pragma unroll 1
    for (int at = thread; at < rows * width; at += threads)
      write(at / width, at % width * 4, merged(at / width, at % width * 4));
  }

 private:
  // The values of all parts. Four are asked for at once: more would save round trips to L2, but their code comes from
  // DRAM (H200, b1 kv1k, 4 parts: 16 at once 16.8 us, 8 14.6, 4 13.7; b1 kv8k, 16 parts: 22.6, 21.3, 21.8).
  FI_DEVICE RowPart merged(int r, int x) const {
    constexpr int kAtOnce = 4;
    const int dim = params.problem.dim_vo;
    const int64_t slot = static_cast<int64_t>(kDecodeRows) * (dim + 2), step = s.step * slot;  // floats
    const float* parts = params.slot(s.slot);
    RowPart sum{kMinusInf, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll 1
    for (int first = 0; first < s.parts; first += kAtOnce) {
      float2 state[kAtOnce];
      float4 value[kAtOnce];
      const float* part = parts + first * step;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float* here = i == 0 && first == 0 ? part + step - slot : part;  // see slot_of
        state[i] = __ldcg(reinterpret_cast<const float2*>(here + kDecodeRows * dim) + r);
        value[i] = __ldcg(reinterpret_cast<const float4*>(here + r * dim + x));
        if (first + i + 1 < s.parts) part += step;  // else the last once more, for nothing
      }
      float top = sum.m;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= s.parts) state[i].x = kMinusInf;
        top = fmaxf(top, state[i].x);
      }
      const float base = softmax_base(top);
      scale(sum, softmax_weight<CudaMath>(sum.m, base));
      sum.m = top;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add(sum, softmax_weight<CudaMath>(state[i].x, base), state[i].y, value[i]);
    }
    return sum;
  }

  FI_DEVICE static void scale(RowPart& part, float factor) {
    part.d *= factor, part.x.x *= factor, part.x.y *= factor, part.x.z *= factor, part.x.w *= factor;
  }
  FI_DEVICE static void add(RowPart& part, float weight, float d, float4 x) {
    part.d += weight * d;
    part.x.x += weight * x.x, part.x.y += weight * x.y, part.x.z += weight * x.z, part.x.w += weight * x.w;
  }
};

}  // namespace fi
