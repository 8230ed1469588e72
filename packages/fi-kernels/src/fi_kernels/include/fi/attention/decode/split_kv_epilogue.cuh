// The epilogue of a decode work tile: it writes the output, or with split KV stores a partial, and the last CTA merges.
#pragma once
#include "fi/attention/decode/batch_decode.h"
#include "fi/attention/vec8.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/barrier.cuh"

namespace fi {

// The softmax state of a row, and four elements of its unnormalised output.
struct PartialOutput {
  float row_max, row_sum;
  float4 output;
};

// Chunks that are merged at a time on Hopper. An epilogue warp merges those of every request, and with four it is
// slower than they stream. H200, 128 requests of 16384 keys, 4 kv heads: four take 1.19 of the time without chunks,
// eight 1.14.
constexpr int kChunkLoads = 8;

// `count` splits of a q tile: first, first + step, ...
struct SplitRange {
  int first, count, step;
};

// The output rows of one work tile.
struct DecodeEpilogue {
  const BatchDecodeParams& params;
  const DecodeWorkTile& s;
  const int dim;             // head_dim_vo; a constant where the caller knows it, which saves many instructions
  int kv_head, first, rows;  // packed rows of the tile

  FI_DEVICE DecodeEpilogue(const BatchDecodeParams& params, const DecodeWorkTile& s, int dim)
      : params(params),
        s(s),
        dim(dim),
        kv_head(params.kv_head(s.q_tile)),
        first(params.first_row(s.q_tile)),
        rows(params.rows(s.request, s.q_tile)) {}

  // Of a q tile with several kv heads: the one of row r, counted in the tile; and what makes this the epilogue of one
  // of them, whose rows count as before.
  FI_DEVICE int head_of(int r) const {
    return static_cast<int>(divide(static_cast<uint32_t>(r), params.problem.group_size));
  }
  FI_DEVICE void select_head(int head) {
    kv_head = kv_head * params.heads_per_tile + head, first -= head * params.problem.group();
  }

  // Element x .. x + 3 of row r, over all keys.
  FI_DEVICE void write(int r, int x, PartialOutput partial) const {
    const AttentionProblem& p = params.problem;
    const Row row = params.row(kv_head, first + r);
    const int64_t token = params.first_token(s.request) + row.i;
    float factor = 1.f;
    if (params.scales.sinks)
      factor = add_sink<CudaMath>(params.scales.sinks[row.head], partial.row_max, partial.row_sum);
    factor *=
        inverse_row_sum(partial.row_sum) * p.value_scale(kv_head) * (params.scales.bmm2 ? *params.scales.bmm2 : 1.f);
    partial.output.x *= factor, partial.output.y *= factor, partial.output.z *= factor, partial.output.w *= factor;
    store_four(p.out, p.out_type, token * p.out_token + row.head * p.out_head + x, partial.output, params.out_aligned);
    if (p.lse && x == 0) p.lse[token * p.qo_heads + row.head] = softmax_lse<CudaMath>(partial.row_max, partial.row_sum);
  }

  FI_DEVICE void store_partial(int split, int r, int x, const PartialOutput& values) const {
    store_global(slot(split) + r * dim + x,
                 make_uint4(__float_as_uint(values.output.x), __float_as_uint(values.output.y),
                            __float_as_uint(values.output.z), __float_as_uint(values.output.w)));
    if (x == 0) partial_states(split)[r] = make_float2(values.row_max, values.row_sum);
  }

  // Merges four values of a row over the warps of the CTA: state(w) and values(w), unnormalised.
  template <int kWarps, class State, class Values>
  FI_DEVICE static PartialOutput merged_warps(State&& state, Values&& values) {
    PartialOutput sum{kMinusInf, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum.row_max = fmaxf(sum.row_max, state(w).x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      add(sum, softmax_exp2<CudaMath>(state(w).x, softmax_reference(sum.row_max)), state(w).y,
          *reinterpret_cast<const float4*>(values(w)));
    return sum;
  }

  // The output of partial i of the q tile, and its softmax states.
  FI_DEVICE float* slot(int i) const { return partial_of(i) + 2 * kDecodeQTile; }
  FI_DEVICE float2* partial_states(int i) const { return reinterpret_cast<float2*>(partial_of(i)); }
  FI_DEVICE int64_t partial_floats() const { return static_cast<int64_t>(kDecodeQTile) * (dim + 2); }

  // The whole epilogue: own(r, x) returns this split's values of a row, write(r, x, values) writes those of all splits.
  // released() is called after the last own. The code is in the order in which it runs: it is fetched from DRAM, and
  // a jump misses (docs/notes/decode-mainloop.md).
  template <class Threads, class Own, class Released, class Write>
  FI_DEVICE void run(Threads& threads, Own&& own, Released&& released, Write&& write) const {
    if (s.is_whole()) {
      for_each_float4(threads, 0, rows, [&](int r, int x) { write(r, x, own(r, x)); });
      released();
      return;
    }
    for_each_float4(threads, 0, rows, [&](int r, int x) { store_partial(s.split_idx, r, x, own(r, x)); });
    released();
    merge(threads, write);
  }

  // Merges the splits after this one has stored its partial. The last CTA to arrive merges up to kDirect splits. More
  // are merged in groups, each into the partial of its first split, and the last group to end merges the groups: one SM
  // would take long to read all partials.
  template <class Threads, class Write>
  FI_DEVICE void merge(Threads& threads, Write&& write) const {
    // Each partial has a counter. A group uses that of its first split, the merge of groups that of the second.
    SplitRange from{0, s.num_splits, 1};
    int counter = 0, group = s.num_splits;
    if (s.num_splits > Threads::kDirect) {
      const int groups = (s.num_splits + kSplitsPerGroup - 1) / kSplitsPerGroup;
      group = (s.num_splits + groups - 1) / groups;
      if (s.has_chunks()) group = Threads::kDirect;  // whatever keys follow that a row does not see
      counter = from.first = s.split_idx - s.split_idx % group;
      from.count = min(group, s.num_splits - from.first);
    }
#pragma unroll 1
    while (arrive(threads, params.schedule.counters() + s.partial_of(counter), from.count)) {
      const bool complete = group >= s.num_splits;
      threads.merge(*this, from, [&](int r, int x, const PartialOutput& values) {
        if (complete)
          write(r, x, values);
        else
          store_partial(from.first, r, x, values);
      });
      if (complete) return;
      from = {0, (s.num_splits + group - 1) / group, group};
      counter = 1, group = s.num_splits;
    }
  }

  // f(r, x) for each four values of `count` rows.
  template <class Threads, class F>
  FI_DEVICE void for_each_float4(const Threads& threads, int row, int count, F&& f) const {
    const int width = dim / 4;
#pragma unroll 1
    for (int at = threads.thread; at < count * width; at += threads.count) f(row + at / width, at % width * 4);
  }

  // Merges four values of a row over splits. Four partials are loaded at a time: more would save round trips to L2, but
  // their code is fetched from DRAM (docs/notes/decode-merge.md).
  template <int kLoadsInFlight = 4>
  FI_DEVICE PartialOutput merged(const SplitRange& from, int r, int x) const {
    const int64_t step = from.step * s.partial_stride * partial_floats();
    const float* partial = partial_of(from.first ? from.first : from.step);
    if (from.first == 0) partial -= step;  // partial 0 is not in this sequence
    PartialOutput sum{kMinusInf, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll 1
    for (int first = 0; first < from.count; first += kLoadsInFlight) {
      float2 state[kLoadsInFlight];
      float4 value[kLoadsInFlight];
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        const float* here = i == 0 && from.first + first == 0 ? partial_of(0) : partial;
        state[i] = __ldcg(reinterpret_cast<const float2*>(here) + r);
        value[i] = __ldcg(reinterpret_cast<const float4*>(here + 2 * kDecodeQTile + r * dim + x));
        if (first + i + 1 < from.count) partial += step;  // else the last one a second time, unused
      }
      add_splits(sum, state, value, from.count - first);
    }
    return sum;
  }

  // Adds the next `count` splits, or four of them.
  template <int kCount>
  FI_DEVICE static void add_splits(PartialOutput& sum, float2 (&state)[kCount], const float4 (&value)[kCount],
                                   int count) {
    float new_max = sum.row_max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= count) state[i].x = kMinusInf;
      new_max = fmaxf(new_max, state[i].x);
    }
    const float reference = softmax_reference(new_max);
    scale(sum, softmax_exp2<CudaMath>(sum.row_max, reference));
    sum.row_max = new_max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) add(sum, softmax_exp2<CudaMath>(state[i].x, reference), state[i].y, value[i]);
  }

 private:
  static constexpr int kSplitsPerGroup = 16;

  FI_DEVICE float* partial_of(int i) const { return params.partials + s.partial_of(i) * partial_floats(); }

  // Whether this CTA is the last of `count` to arrive. All threads of the epilogue call it.
  template <class Threads>
  FI_DEVICE bool arrive(const Threads& threads, int32_t* counter, int count) const {
    threads.sync();
    if (threads.thread == 0) {
      *threads.last = count_device(counter) == count - 1;  // by one thread for all threads of the barrier
      if (*threads.last) *counter = 0;                     // for the next launch
    }
    threads.sync();
    return *threads.last;
  }

  FI_DEVICE static void scale(PartialOutput& partial, float factor) {
    partial.row_sum *= factor, partial.output.x *= factor, partial.output.y *= factor, partial.output.z *= factor,
        partial.output.w *= factor;
  }
  FI_DEVICE static void add(PartialOutput& partial, float rescale, float row_sum, float4 output) {
    partial.row_sum += rescale * row_sum;
    partial.output.x += rescale * output.x, partial.output.y += rescale * output.y,
        partial.output.z += rescale * output.z, partial.output.w += rescale * output.w;
  }
};

// The threads that run an epilogue together: warps that share a named barrier. Each thread reads the partials that it
// merges from global memory. `last` is in shared memory.
// kLoads: chunks that they merge at a time.
template <int kMaxDirect, int kLoads = 4>
struct EpilogueThreads {
  static constexpr int kDirect = kMaxDirect;
  int thread, count, barrier;
  int* last;

  FI_DEVICE void sync() const { barrier_sync(barrier, count); }

  // Calls take(r, x, values) for all rows. take may overwrite the partials of a row, which all threads have read.
  template <class Take>
  FI_DEVICE void merge(const DecodeEpilogue& epilogue, const SplitRange& from, Take&& take) {
    const int width = epilogue.dim / 4;
#pragma unroll 1
    for (int first = 0; first < epilogue.rows * width; first += count) {
      const int at = first + thread, r = at / width, x = at % width * 4;
      PartialOutput values;
      if (r < epilogue.rows)
        values = epilogue.s.has_chunks() ? epilogue.merged<kLoads>(from, r, x) : epilogue.merged(from, r, x);
      sync();
      if (r < epilogue.rows) take(r, x, values);
    }
  }
};

}  // namespace fi
