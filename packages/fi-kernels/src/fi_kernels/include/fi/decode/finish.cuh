// The end of a part of an item: written out if it is whole, else left in its slot, and merged by the last to arrive.
#pragma once
#include "fi/attention/eight.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/barrier.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/decode/batch_decode.h"

namespace fi {

// The softmax state of a row, and four of its values.
struct RowPart {
  float m, d;
  float4 x;
};

// The threads that finish a segment together: warps that meet at a named barrier, and shared memory of theirs.
struct FinishTeam {
  int thread, threads, barrier;
  int* last;
  char* room;  // parts on their way, kPart bytes for each thread
  int parts;   // that fit in

  static constexpr int kPart = 32;
  FI_DEVICE static FinishTeam of(int thread, int threads, int barrier, int* last, void* room, int bytes) {
    return {thread, threads, barrier, last, static_cast<char*>(room), bytes / (threads * kPart)};
  }
};

// The writes of one segment: rows of its tile.
struct Finish {
  const BatchDecodeParams& params;
  const DecodeSegment& s;
  const int dim;             // of values: where the caller knows it, a constant saves many instructions
  int kv_head, first, rows;  // packed rows of the tile

  FI_DEVICE Finish(const BatchDecodeParams& params, const DecodeSegment& s, int dim)
      : params(params),
        s(s),
        dim(dim),
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

  FI_DEVICE void publish(int part, int r, int x, const RowPart& values) const {
    float* const to = slot(part);
    store_global(to + r * dim + x, make_uint4(__float_as_uint(values.x.x), __float_as_uint(values.x.y),
                                              __float_as_uint(values.x.z), __float_as_uint(values.x.w)));
    if (x == 0) reinterpret_cast<float2*>(to + kDecodeRows * dim)[r] = make_float2(values.m, values.d);
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

  // Everything: own(r, x) gives this part's values of a row, write(r, x, values) takes those of all parts. kPublished:
  // this part lies in its slot. released() is called when own is needed no more.
  //
  // Up to kDirect parts are merged by the last to arrive. Of more every kGroup are merged so, each sum takes the slot
  // of the first, and the last group to be done merges the sums: one multiprocessor would take long to read them all.
  template <bool kPublished, class Own, class Released, class Write>
  FI_DEVICE void finish(const FinishTeam& team, Own&& own, Released&& released, Write&& write) const {
    const int width = dim / 4, size = rows * width;
    const int group = s.parts <= kDirect ? s.parts : kGroup;
    Parts from{s.part, 0, 1};  // count 0: own
    bool complete = s.whole();
#pragma unroll 1
    while (true) {
      if (!kPublished || from.count) {
#pragma unroll 1
        for (int base = 0; base < size; base += team.threads) {
          const int at = base + team.thread, r = at / width, x = at % width * 4;
          RowPart values;
          if (at < size) {
            if (kPublished || from.count)
              values = merged(team, from, r, x);
            else
              values = own(r, x);
          }
          if (from.count && !complete) barrier_sync(team.barrier, team.threads);  // the slot was one of those read
          if (at >= size) continue;
          if (complete)
            write(r, x, values);
          else
            publish(from.first, r, x, values);
        }
      }
      if (from.count == 0) released();
      if (complete) return;
      if (from.count)
        from = {0, (s.parts + group - 1) / group, group};
      else
        from = {s.part / group * group, min(group, s.parts - s.part / group * group), 1};
      complete = from.step > 1 || group == s.parts;
      // Each slot has a counter: a group's is that of its first, that of the sums is the second slot's.
      if (!arrive(team, params.view().counters() + s.slot_of(from.step > 1 ? 1 : from.first), from.count)) return;
    }
  }

 private:
#ifndef FI_DIRECT
#define FI_DIRECT 40
#define FI_GROUP 16
#endif
  static constexpr int kDirect = FI_DIRECT, kGroup = FI_GROUP, kAtOnce = 4;

  struct Parts {
    int first, count, step;
  };

  // Part i of the item: see BatchDecodeParams::slot.
  FI_DEVICE int64_t slot_size() const { return static_cast<int64_t>(kDecodeRows) * (dim + 2); }
  FI_DEVICE float* slot(int i) const { return params.workspace + s.slot_of(i) * slot_size(); }

  // Whether this is the last of so many to arrive, whose parts or sums are published. By all threads of the team.
  FI_DEVICE bool arrive(const FinishTeam& team, int32_t* counter, int count) const {
    barrier_sync(team.barrier, team.threads);
    if (team.thread == 0) {
      *team.last = count_device(counter) == count - 1;  // by one thread for all that it met at the barrier
      if (*team.last) *counter = 0;                     // for the next launch
    }
    barrier_sync(team.barrier, team.threads);
    return *team.last;
  }

  // The values of parts. A thread asks for as many as have room before it waits for the first; only it reads them.
  FI_DEVICE RowPart merged(const FinishTeam& team, const Parts& from, int r, int x) const {
    const int pitch = team.threads * FinishTeam::kPart;
    char* const values = team.room + team.thread * 16;
    char* const states = values + team.threads * 16;  // of two rows each
    const float* part = slot(from.first ? from.first : from.step);
    const int64_t step = from.step * s.step * slot_size();
    if (from.first == 0) part -= step;  // the slot of part 0 lies elsewhere
    RowPart sum{kMinusInf, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll 1
    for (int begin = 0; begin < from.count; begin += team.parts) {
      const int count = min(team.parts, from.count - begin);
#pragma unroll 1
      for (int i = 0; i < count; ++i, part += step) {
        const float* here = from.first + begin + i ? part : slot(0);
        cp_async_16(values + i * pitch, here + r * dim + x);
        cp_async_16(states + i * pitch, here + kDecodeRows * dim + r / 2 * 4);
      }
      cp_async_commit();
      cp_async_wait<0>();
      const auto state = [&](int i) {
        return i < count ? *reinterpret_cast<const float2*>(states + i * pitch + r % 2 * 8)
                         : make_float2(kMinusInf, 0.f);
      };
      float top = sum.m;
#pragma unroll 1
      for (int i = 0; i < count; i += kAtOnce)
#pragma unroll
        for (int j = i; j < i + kAtOnce; ++j) top = fmaxf(top, state(j).x);
      const float base = softmax_base(top);
      scale(sum, softmax_weight<CudaMath>(sum.m, base));
      sum.m = top;
#pragma unroll 1
      for (int i = 0; i < count; i += kAtOnce)
#pragma unroll
        for (int j = i; j < i + kAtOnce; ++j)
          add(sum, softmax_weight<CudaMath>(state(j).x, base), state(j).y,
              *reinterpret_cast<const float4*>(values + min(j, count - 1) * pitch));
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
