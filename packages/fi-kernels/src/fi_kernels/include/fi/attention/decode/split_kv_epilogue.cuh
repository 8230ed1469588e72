// The epilogue of a decode work tile: it writes the output, or with split KV stores a partial, and the last CTA merges.
#pragma once
#include "fi/attention/decode/batch_decode.h"
#include "fi/attention/vec8.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/barrier.cuh"

namespace fi {

// The softmax state of a row, and four elements of its unnormalised output.
struct PartialOutput {
  float m, d;
  float4 x;
};

// `count` splits of an item: first, first + step, ...
struct SplitRange {
  int first, count, step;
};

// The output rows of one work tile.
struct DecodeEpilogue {
  const BatchDecodeParams& params;
  const DecodeWorkTile& s;
  const int dim;             // of values: where the caller knows it, a constant saves many instructions
  int kv_head, first, rows;  // packed rows of the tile

  FI_DEVICE DecodeEpilogue(const BatchDecodeParams& params, const DecodeWorkTile& s, int dim)
      : params(params),
        s(s),
        dim(dim),
        kv_head(params.kv_head(s.q_tile)),
        first(params.first_row(s.q_tile)),
        rows(params.rows(s.request, s.q_tile)) {}

  // Element x .. x + 3 of row r, over all keys.
  FI_DEVICE void write(int r, int x, PartialOutput part) const {
    const AttentionProblem& p = params.problem;
    const Row row = params.row(kv_head, first + r);
    const int64_t token = params.first_token(s.request) + row.i;
    float factor = 1.f;
    if (params.sinks) factor = add_sink<CudaMath>(params.sinks[row.head], part.m, part.d);
    factor *= inverse_row_sum(part.d) * p.value_scale(kv_head) * (params.bmm2_scale ? *params.bmm2_scale : 1.f);
    part.x.x *= factor, part.x.y *= factor, part.x.z *= factor, part.x.w *= factor;
    store_four(p.out, p.out_type, token * p.out_token + row.head * p.out_head + x, part.x, params.out_aligned);
    if (p.lse && x == 0) p.lse[token * p.qo_heads + row.head] = softmax_lse<CudaMath>(part.m, part.d);
  }

  FI_DEVICE void publish(int part, int r, int x, const PartialOutput& values) const {
    store_global(slot(part) + r * dim + x, make_uint4(__float_as_uint(values.x.x), __float_as_uint(values.x.y),
                                                      __float_as_uint(values.x.z), __float_as_uint(values.x.w)));
    if (x == 0) partial_states(part)[r] = make_float2(values.m, values.d);
  }

  // Four values of a row over the warps of the block: state(w) and values(w), unnormalised.
  template <int kWarps, class State, class Values>
  FI_DEVICE static PartialOutput merged_warps(State&& state, Values&& values) {
    PartialOutput sum{kMinusInf, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum.m = fmaxf(sum.m, state(w).x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      add(sum, softmax_exp2<CudaMath>(state(w).x, softmax_reference(sum.m)), state(w).y,
          *reinterpret_cast<const float4*>(values(w)));
    return sum;
  }

  // Where part i of the item lies: see BatchDecodeParams::slot.
  FI_DEVICE float* slot(int i) const { return partial_of(i) + 2 * kDecodeQTile; }
  FI_DEVICE float2* partial_states(int i) const { return reinterpret_cast<float2*>(partial_of(i)); }
  FI_DEVICE int64_t partial_floats() const { return static_cast<int64_t>(kDecodeQTile) * (dim + 2); }

  // Everything: own(r, x) gives this part's values of a row, write(r, x, values) takes those of all parts. released()
  // is called when own is needed no more. What runs one after the other lies so in the code: it comes from DRAM, and
  // each jump is a line that was not on its way (H200, b4 kv1k of fp8 keys: 3.0 us for publishing, of which 0.6 remain
  // where the code is in the multiprocessor).
  template <class Team, class Own, class Released, class Write>
  FI_DEVICE void finish(Team& team, Own&& own, Released&& released, Write&& write) const {
    if (s.is_whole()) {
      each(team, 0, rows, [&](int r, int x) { write(r, x, own(r, x)); });
      released();
      return;
    }
    each(team, 0, rows, [&](int r, int x) { publish(s.split_idx, r, x, own(r, x)); });
    released();
    merge(team, write);
  }

  // What comes after this part was published. Up to kDirect parts are merged by the last to arrive. More are merged in
  // groups, each sum in the slot of its group's first, and the last group to be done merges the sums: one
  // multiprocessor would take long to read them all.
  template <class Team, class Write>
  FI_DEVICE void merge(Team& team, Write&& write) const {
    // Each slot has a counter: a group's is that of its first, that of the sums is the second slot's.
    SplitRange from{0, s.num_splits, 1};
    int counter = 0, group = s.num_splits;
    if (s.num_splits > Team::kDirect) {
      const int groups = (s.num_splits + kGroup - 1) / kGroup;
      group = (s.num_splits + groups - 1) / groups;
      counter = from.first = s.split_idx - s.split_idx % group;
      from.count = min(group, s.num_splits - from.first);
    }
#pragma unroll 1
    while (arrive(team, params.view().counters() + s.partial_of(counter), from.count)) {
      const bool complete = group >= s.num_splits;
      team.merge(*this, from, [&](int r, int x, const PartialOutput& values) {
        if (complete)
          write(r, x, values);
        else
          publish(from.first, r, x, values);
      });
      if (complete) return;
      from = {0, (s.num_splits + group - 1) / group, group};
      counter = 1, group = s.num_splits;
    }
  }

  // f(r, x) for each four values of `count` rows.
  template <class Team, class F>
  FI_DEVICE void each(const Team& team, int row, int count, F&& f) const {
    const int width = dim / 4;
#pragma unroll 1
    for (int at = team.thread; at < count * width; at += team.threads) f(row + at / width, at % width * 4);
  }

  // Four values of a row, of all parts. Four parts are asked for at once: more would save round trips to L2, but their
  // code comes from DRAM (H200, b1 kv1k, 4 parts: 16 at once 16.8 us, 8 14.6, 4 13.7; b1 kv8k, 16 parts: 22.6, 21.3,
  // 21.8).
  FI_DEVICE PartialOutput merged(const SplitRange& from, int r, int x) const {
    constexpr int kAtOnce = 4;
    const int64_t step = from.step * s.partial_stride * partial_floats();
    const float* part = partial_of(from.first ? from.first : from.step);
    if (from.first == 0) part -= step;  // the slot of part 0 lies elsewhere
    PartialOutput sum{kMinusInf, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll 1
    for (int first = 0; first < from.count; first += kAtOnce) {
      float2 state[kAtOnce];
      float4 value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float* here = i == 0 && from.first + first == 0 ? partial_of(0) : part;
        state[i] = __ldcg(reinterpret_cast<const float2*>(here) + r);
        value[i] = __ldcg(reinterpret_cast<const float4*>(here + 2 * kDecodeQTile + r * dim + x));
        if (first + i + 1 < from.count) part += step;  // else the last once more, for nothing
      }
      float top = sum.m;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= from.count) state[i].x = kMinusInf;
        top = fmaxf(top, state[i].x);
      }
      const float base = softmax_reference(top);
      scale(sum, softmax_exp2<CudaMath>(sum.m, base));
      sum.m = top;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add(sum, softmax_exp2<CudaMath>(state[i].x, base), state[i].y, value[i]);
    }
    return sum;
  }

 private:
  static constexpr int kGroup = 16;

  FI_DEVICE float* partial_of(int i) const { return params.workspace + s.partial_of(i) * partial_floats(); }

  // Whether this is the last of so many to arrive, whose parts or sums are published. By all threads of the team.
  template <class Team>
  FI_DEVICE bool arrive(const Team& team, int32_t* counter, int count) const {
    team.meet();
    if (team.thread == 0) {
      *team.last = count_device(counter) == count - 1;  // by one thread for all that it met at the barrier
      if (*team.last) *counter = 0;                     // for the next launch
    }
    team.meet();
    return *team.last;
  }

  FI_DEVICE static void scale(PartialOutput& part, float factor) {
    part.d *= factor, part.x.x *= factor, part.x.y *= factor, part.x.z *= factor, part.x.w *= factor;
  }
  FI_DEVICE static void add(PartialOutput& part, float weight, float d, float4 x) {
    part.d += weight * d;
    part.x.x += weight * x.x, part.x.y += weight * x.y, part.x.z += weight * x.z, part.x.w += weight * x.w;
  }
};

// The threads that run an epilogue together: warps that meet at a named barrier. Each thread reads the partials that it
// merges from global memory. `last` is in shared memory.
template <int kMaxDirect>
struct EpilogueThreads {
  static constexpr int kDirect = kMaxDirect;
  int thread, threads, barrier;
  int* last;

  FI_DEVICE void meet() const { barrier_sync(barrier, threads); }

  // take(r, x, values) for all rows, which may replace what was read, row by row.
  template <class Take>
  FI_DEVICE void merge(const DecodeEpilogue& finish, const SplitRange& from, Take&& take) {
    const int width = finish.dim / 4;
#pragma unroll 1
    for (int base = 0; base < finish.rows * width; base += threads) {
      const int at = base + thread, r = at / width, x = at % width * 4;
      PartialOutput values;
      if (r < finish.rows) values = finish.merged(from, r, x);
      meet();
      if (r < finish.rows) take(r, x, values);
    }
  }
};

}  // namespace fi
