// Merges the partials of an item whose KV was split, at the end of the kernel that computes them: the CTA of each split
// waits a moment for the others and merges a share of the rows. The bits depend neither on which CTA does it nor on the
// order in which they arrive, so two may do the same.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/cuda/convert.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/barrier.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/reduce.cuh"

namespace fi {

// One row of a split item.
struct MlaMergeRow {
  const BatchMlaParams& params;
  const MlaWorkTile& item;
  int row, packed;  // of the q tile, of the request
  // The partial of split 0, and what that of split i is i steps from: slots as mla_partial counts them.
  const char *first, *others;
  uint32_t step;  // bytes

  FI_DEVICE MlaMergeRow(const BatchMlaParams& p, const MlaWorkTile& s, int r)
      : params(p),
        item(s),
        row(r),
        packed(s.q_tile * p.tile_rows + r),
        first(reinterpret_cast<const char*>(p.partial_output(mla_partial(s.leader, 0)))),
        others(reinterpret_cast<const char*>(p.partial_output(2 * s.leader))),
        step(static_cast<uint32_t>(2 * p.partial_floats() * sizeof(float))) {}
  FI_DEVICE bool exists() const { return packed < item.request.qo_len * static_cast<int>(params.heads.value); }
  FI_DEVICE const char* partial(int split) const { return split ? other(split) : first; }
  FI_DEVICE const char* other(int split) const {
    return others + static_cast<uint64_t>(static_cast<uint32_t>(split)) * step;
  }
  FI_DEVICE float2 state(const char* partial) const {
    return __ldcg(reinterpret_cast<const float2*>(partial + params.tile_rows * (kMlaLatent * 4)) + row);
  }
  FI_DEVICE float4 values(const char* partial, int column) const {
    return __ldcg(reinterpret_cast<const float4*>(partial + (row * kMlaLatent + column) * 4));
  }
  FI_DEVICE static void add(float4& sum, float weight, float4 x) {
    sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
  }
  // Writes four columns of each of kCount times 128; those from column 0 on also the LSE.
  template <class T, int kCount>
  FI_DEVICE void write(int column, const float4 (&sums)[kCount], float row_max, float row_sum) const {
    const auto at = params.row(packed);
    const int64_t token = item.request.qo_begin + at.token;
    if (params.score_stats && column == 0) params.write_stats<CudaMath>(token, at.head, row_max, row_sum);
    const float factor = params.finish<CudaMath>(at.head, row_max, row_sum);
    T* out = static_cast<T*>(params.out) + token * params.out_token + at.head * params.out_head + column;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      store_global(out + i * 128, make_uint2(pack_pair(sums[i].x * factor, sums[i].y * factor, T()),
                                             pack_pair(sums[i].z * factor, sums[i].w * factor, T())));
    if (params.lse && column == 0) params.write_lse<CudaMath>(token, at.head, row_max, row_sum);
  }
};

// kThreads meet at the named barrier kBarrier, from thread 0 of a CTA of kRows rows on. kLoads: splits of a row that a
// warp loads at a time where splits are few.
template <class T, int kThreads, int kBarrier, int kRows, int kLoads>
struct MlaMerge {
  static constexpr int kWarps = kThreads / 32, kPieces = kMlaLatent / 128;  // a warp merges 128 columns of a row
  // Up to so many splits a warp merges whole rows, all splits of them.
  static constexpr int kFewSplits = 8;
  // A CTA that has waited so long leaves its share to the last one: the others may not even have begun.
  static constexpr int kWaitClocks = 40000;

  // Sums that a warp leaves to another: of fine chunks those of two groups.
  static constexpr int kGroups = kMlaFineSplits ? 2 : 1, kOfGroup = kMlaChunkTiles / kMlaFineTiles;

  struct Shared {
    float4 sums[kWarps][kGroups][32];
    float2 states[kWarps][kGroups];
    int shares[kThreads], count;  // left to the last CTA
    uint32_t round;
    bool is_last, complete;
  };

  const BatchMlaParams& params;
  const MlaWork& item;
  Shared& shared;
  const int thread, first, cta;  // first: the row of the q tile that is the CTA's first; cta: of the cluster

  // Behind the stores of this split's partial.
  FI_DEVICE void run() const {
    if constexpr (kMlaFixedSplits)
      if (!item.merges()) return;
    sync();
    if (thread == 0) arrive();
    sync();
    int found = shared.complete, share = item.split;
    for (int base = 0;; base += kThreads) {
      for (int i = 0; i < found; ++i) merge(base ? shared.shares[i] : share);
      if (!shared.is_last || base >= item.num_splits) break;
      sync();
      if (thread == 0) shared.count = 0;
      sync();
      share = base + thread;
      if (share < item.num_splits && share != item.split && __ldcg(&left(share)) == shared.round)
        shared.shares[atomicAdd(&shared.count, 1)] = share;
      sync();
      found = shared.count;
    }
    sync();  // `shared` may serve others
  }

 private:
  FI_DEVICE void sync() const {
    __syncwarp();  // racecheck does not see the stores of single lanes before a named barrier without it
    barrier_sync(kBarrier, kThreads);
  }
  FI_DEVICE MlaArrivals& arrivals(int range) const { return params.view().arrivals()[range * params.cluster + cta]; }
  // The last round in which the CTA of split i left its share to others.
  FI_DEVICE uint32_t& left(int i) const {
    const int slot = mla_partial(item.leader, i);
    return arrivals(slot / 2).left[slot % 2];
  }

  // By thread 0. Who arrives last sees in `left` all who do not wait; who leaves later finds that all have arrived.
  FI_DEVICE void arrive() const {
    uint32_t& count = arrivals(item.leader).count;
    const auto n = static_cast<uint32_t>(item.num_splits), rounds = 1u << 20;  // then counts begin at 0 again
    if (!item.ends_range) left(item.split) = load_device(&count) / n + 1;
    const uint32_t before = count_device(&count, n * rounds), first = before / n * n;
    shared.round = before / n + 1;
    shared.is_last = before + 1 == first + n;
    bool complete = shared.is_last;
    if (item.ends_range && !complete) {
      const int64_t begin = clock64();
      while (!complete && clock64() - begin < kWaitClocks) complete = load_device(&count) - first >= n;
      if (!complete) {
        left(item.split) = shared.round;
        complete = meet_device(&count) - first >= n;
      }
    }
    shared.complete = complete;
  }

  FI_DEVICE void merge(int share) const {
    const int exist =
        item.request.qo_len * static_cast<int>(params.heads.value) - item.q_tile * params.tile_rows - first;
    const int n = item.num_splits, rows = max(0, min(kRows, exist));
    const int units = n <= kFewSplits && !kMlaFixedSplits ? rows : rows * kPieces;
    const int begin = units * share / n, end = units * (share + 1) / n;
    if constexpr (kMlaFineSplits)
      fold_fine_pieces(begin, end);
    else if constexpr (kMlaFixedSplits)
      fold_pieces(begin, end);
    else if (n <= kFewSplits)
      merge_rows(begin, end);
    else
      merge_pieces(begin, end);
  }

  // Four columns of the splits so far, relative to row_max.
  struct State {
    float row_max = kMinusInf, row_sum = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);

    FI_DEVICE void raise(float top) {
      const float alpha = softmax_exp2<CudaMath>(row_max, softmax_reference(top));
      row_max = top, row_sum *= alpha;
      sum.x *= alpha, sum.y *= alpha, sum.z *= alpha, sum.w *= alpha;
    }
    FI_DEVICE void fold(float2 next, float4 values) {
      const auto fold = mla_fold<CudaMath>(row_max, row_sum, next.x, next.y);
      row_max = fold.row_max, row_sum = fold.row_sum;
      sum.x = fold.value(sum.x, values.x), sum.y = fold.value(sum.y, values.y);
      sum.z = fold.value(sum.z, values.z), sum.w = fold.value(sum.w, values.w);
    }
    FI_DEVICE void add(float2 state, float4 values) {
      const float weight = softmax_exp2<CudaMath>(state.x, softmax_reference(row_max));
      row_sum += weight * state.y;
      MlaMergeRow::add(sum, weight, values);
    }
  };

  // Splits i, i + each ... of a row: kCount of them, or fewer without kAll. NOTE: no load is behind a branch.
  template <int kCount, bool kAll>
  FI_DEVICE void add(State& state, const MlaMergeRow& row, int i, int each, int column) const {
    float2 states[kCount];
    float4 values[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int split = kAll ? i + k * each : min(i + k * each, item.num_splits - 1);
      const char* partial = k && kAll ? row.other(split) : row.partial(split);
      states[k] = row.state(partial), values[k] = row.values(partial, column);
      if (i + k * each >= item.num_splits) states[k] = make_float2(kMinusInf, 0.f);
    }
    float top = state.row_max;
#pragma unroll
    for (int k = 0; k < kCount; ++k) top = fmaxf(top, states[k].x);
    state.raise(top);
#pragma unroll
    for (int k = 0; k < kCount; ++k) state.add(states[k], values[k]);
  }

  FI_DEVICE void merge_rows(int begin, int end) const {
    const int lane = thread % 32, n = item.num_splits;
#pragma unroll 1
    for (int r = begin + thread / 32; r < end; r += kWarps) {
      const MlaMergeRow row(params, item, first + r);
      if (!row.exists()) continue;
      const float2 state = lane < n ? row.state(row.partial(lane)) : make_float2(kMinusInf, 0.f);
      float top = 0.f, weight = 0.f, row_sum = 0.f;
      float4 sums[kPieces] = {};
#pragma unroll 1
      for (int i = 0; i < n; i += kLoads) {
        float4 values[kLoads][kPieces];
#pragma unroll
        for (int k = 0; k < kLoads; ++k)
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece)
            values[k][piece] =
                i + k < n ? row.values(row.partial(i + k), piece * 128 + lane * 4) : make_float4(0.f, 0.f, 0.f, 0.f);
        if (i == 0) {
          top = warp_max(state.x), weight = softmax_exp2<CudaMath>(state.x, softmax_reference(top));
          row_sum = warp_sum(weight * state.y);
        }
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          const float factor = __shfl_sync(0xffffffffu, weight, (i + k) % 32);  // 0 beyond the last split
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) MlaMergeRow::add(sums[piece], factor, values[k][piece]);
        }
      }
      row.template write<T>(lane * 4, sums, top, row_sum);
    }
  }

  // Of fixed splits: a warp folds the chunks of a piece one after another, whatever their number.
  FI_DEVICE void fold_pieces(int begin, int end) const {
    constexpr int kBatch = 4 * kLoads;
    const int warp = thread / 32, lane = thread % 32;
    // The first range has folded its chunks.
    const int folded = params.view().starts()[item.leader + 1].kv_tile / kMlaChunkTiles;
    const int n = item.request.chunks() - folded + 1;
#pragma unroll 1
    for (int unit = begin + warp; unit < end; unit += kWarps) {
      const MlaMergeRow row(params, item, first + unit / kPieces);
      if (!row.exists()) continue;
      const int column = unit % kPieces * 128 + lane * 4;
      State state;
#pragma unroll 1
      for (int i = 0; i < n; i += kBatch) {
        float2 states[kBatch];
        float4 values[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int slot = min(i + k, n - 1);
          const float* partial = params.partial_output(item.first_partial() + (slot ? folded + slot - 1 : 0));
          states[k] = row.state(reinterpret_cast<const char*>(partial));
          values[k] = row.values(reinterpret_cast<const char*>(partial), column);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k)
          if (i + k < n) state.fold(states[k], values[k]);
      }
      row.template write<T>(column, {state.sum}, state.row_max, state.row_sum);
    }
  }

  // The states of a split item of fine chunks, in groups that are folded to one before: of kOfGroup chunks, or of one
  // state. The first is then that of all chunks of the range in which the item begins.
  struct FineStates {
    int count, step;             // step: states of a group
    const char *first, *others;  // the partial of state 0, and what those of state i are i strides from
    uint32_t stride;             // bytes

    FI_DEVICE const char* partial(int i) const {
      return i ? others + static_cast<uint64_t>(static_cast<uint32_t>(i)) * stride : first;
    }
  };
  FI_DEVICE FineStates fine_states() const {
    MlaWorkTile whole = item;
    whole.end = 0x7fffffff / kMlaKvTile;
    constexpr int kChunkKeys = kMlaChunkTiles * kMlaKvTile, kFineKeys = kChunkKeys / kOfGroup;
    const int high = params.high(whole, item.q_tile * kRows, kRows);  // no state is stored behind
    const char* first = reinterpret_cast<const char*>(params.partial_output(item.first_partial()));
    const auto bytes = static_cast<uint32_t>(params.partial_floats() * sizeof(float));
    if (item.has_chunks()) return {(high + kFineKeys - 1) / kFineKeys, kOfGroup, first, first, bytes};
    const int folded = params.view().starts()[item.leader + 1].kv_tile / kMlaChunkTiles;
    const char* others = first + static_cast<int64_t>(folded - 1) * kOfGroup * bytes;
    return {max((high + kChunkKeys - 1) / kChunkKeys - folded, 0) + 1, 1, first, others, kOfGroup * bytes};
  }

  // Of fine chunks: several warps merge a piece. Each folds groups, and the first of them folds the groups in their
  // order. The factors of a row's states are computed by one lane each: of a lane for all, the code is five times as
  // long, and it is fetched from DRAM (docs/notes/mla-fine-splits.md).
  FI_DEVICE void fold_fine_pieces(int begin, int end) const {
    const int warp = thread / 32, lane = thread % 32;
    const FineStates stored = fine_states();
    const int groups = (stored.count + stored.step - 1) / stored.step;
    int each = kWarps;
    while (each > 1 && each * (end - begin) > kWarps) each /= 2;
    const int together = kWarps / each, member = warp % each;
#pragma unroll 1
    for (int base = begin; base < end; base += together) {
      const int piece = base + warp / each, column = piece % kPieces * 128 + lane * 4;
      const MlaMergeRow row(params, item, first + piece / kPieces);
      const bool exists = piece < end && row.exists();
      State state;
#pragma unroll 1
      for (int g = 0; g < groups; g += each * kGroups) {
        const int own = g + member * kGroups;
        if (exists && own < groups) fold_groups(row, stored, own * stored.step, column);
        sync();
        if (exists && member == 0) fold_in_order(state, min(each * kGroups, groups - g));
        sync();
      }
      if (exists && member == 0) row.template write<T>(column, {state.sum}, state.row_max, state.row_sum);
    }
  }

  // Factors of the states in lanes and of what is before each, as mla_fold has them. top: the largest score so far.
  struct Factors {
    float before, next;

    FI_DEVICE Factors(float max_before, float max_next, float top) {
      const float reference = softmax_reference(top);
      before = softmax_exp2<CudaMath>(max_before, reference), next = softmax_exp2<CudaMath>(max_next, reference);
    }
    // Adds state `i` of the warp.
    FI_DEVICE void add(State& state, int i, float row_sum, const float4& values) const {
      const MlaFold fold{0.f, 0.f, __shfl_sync(0xffffffffu, before, i), __shfl_sync(0xffffffffu, next, i)};
      state.row_sum = fold.value(state.row_sum, __shfl_sync(0xffffffffu, row_sum, i));
      state.sum.x = fold.value(state.sum.x, values.x), state.sum.y = fold.value(state.sum.y, values.y);
      state.sum.z = fold.value(state.sum.z, values.z), state.sum.w = fold.value(state.sum.w, values.w);
    }
  };

  // By a warp: leaves the sums of kGroups groups of states, from `begin` on.
  FI_DEVICE void fold_groups(const MlaMergeRow& row, const FineStates& stored, int begin, int column) const {
    constexpr int kMost = kGroups * kOfGroup;
    const int warp = thread / 32, lane = thread % 32, last = stored.step - 1;  // of a group; a mask
    const int count = min(kGroups * stored.step, stored.count - begin);
    const float2 own = lane < count ? row.state(stored.partial(begin + lane)) : make_float2(kMinusInf, 0.f);
    float4 values[kMost];
    const char* others = stored.others + static_cast<uint64_t>(static_cast<uint32_t>(begin)) * stored.stride;
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (i < count) values[i] = row.values(i ? others + i * stored.stride : stored.partial(begin), column);
    float top = own.x;
#pragma unroll
    for (int offset = 1; offset < kOfGroup; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, top, offset);
      if ((lane & last) >= offset) top = fmaxf(top, other);
    }
    const float before = __shfl_up_sync(0xffffffffu, top, 1);
    const Factors factors(lane & last ? before : kMinusInf, own.x, top);
    State state;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= count) break;
      if ((i & last) == 0) state = State();
      factors.add(state, i, own.y, values[i]);
      if ((i & last) != last && i + 1 < count) continue;
      const int group = last ? i / kOfGroup : i;
      shared.sums[warp][group][lane] = state.sum;
      if (lane == i) shared.states[warp][group] = make_float2(top, state.row_sum);
    }
  }

  // By a warp: folds the next groups, up to 32, which it and the warps behind it have left.
  FI_DEVICE void fold_in_order(State& state, int count) const {
    const int warp = thread / 32, lane = thread % 32;
    const float2 own =
        lane < count ? shared.states[warp + lane / kGroups][lane % kGroups] : make_float2(kMinusInf, 0.f);
    float top = own.x;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, top, offset);
      if (lane >= offset) top = fmaxf(top, other);
    }
    top = fmaxf(top, state.row_max);
    const float before = __shfl_up_sync(0xffffffffu, top, 1);
    const Factors factors(lane ? before : state.row_max, own.x, top);
#pragma unroll 1
    for (int i = 0; i < count; ++i) factors.add(state, i, own.y, shared.sums[warp + i / kGroups][i % kGroups][lane]);
    state.row_max = __shfl_sync(0xffffffffu, top, count - 1);
  }

  // Where a share has fewer pieces than the CTA has warps, several warps merge a piece, each some of its splits.
  FI_DEVICE void merge_pieces(int begin, int end) const {
    constexpr int kBatch = 4 * kLoads;
    const int warp = thread / 32, lane = thread % 32, n = item.num_splits;
    int each = kWarps;
    while (each > 1 && each * (end - begin) > kWarps) each /= 2;
    const int together = kWarps / each, member = warp % each;
#pragma unroll 1
    for (int base = begin; base < end; base += together) {
      const int piece = base + warp / each, column = piece % kPieces * 128 + lane * 4;
      const MlaMergeRow row(params, item, first + piece / kPieces);
      const bool exists = piece < end && row.exists();
      State state;
      int i = exists ? member : n;
#pragma unroll 1
      for (; i + (kBatch - 1) * each < n; i += each * kBatch) add<kBatch, true>(state, row, i, each, column);
#pragma unroll 1
      for (; i < n; i += each * kLoads) add<kLoads, false>(state, row, i, each, column);
      if (each > 1) {
        shared.sums[warp][0][lane] = state.sum;
        if (lane == 0) shared.states[warp][0] = make_float2(state.row_max, state.row_sum);
        sync();
        if (member == 0)
#pragma unroll 1
          for (int i = 1; i < each; ++i) {
            const float2 other = shared.states[warp + i][0];
            state.raise(fmaxf(state.row_max, other.x));
            state.add(other, shared.sums[warp + i][0][lane]);
          }
      }
      if (exists && member == 0) row.template write<T>(column, {state.sum}, state.row_max, state.row_sum);
      if (each > 1) sync();
    }
  }
};

}  // namespace fi
