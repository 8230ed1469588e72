// Rotary embedding (Su et al. 2021, arXiv:2104.09864) on sm_80 and later: a thread computes the angles of its pairs
// once and walks over heads, with both members of each pair in its own registers.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/divisor.h"
#include "fi/rope/rope.h"

namespace fi {

// Two vectors of a row and the pairs in them: kHalf from pair(0) on and, unless a vector is one element, kHalf from
// pair(1) on.
template <int kVec, bool kInterleave>
struct RopeLane {
  static constexpr int kPairs = kVec, kHalf = kVec == 1 ? 1 : kVec / 2, kRuns = kVec == 1 ? 1 : 2;
  int lane, rotary_dim;

  // Vectors of interleaved pairs are far apart too, so that neighbouring lanes read neighbouring vectors.
  FI_DEVICE int at(int vector) const {
    if constexpr (kInterleave && kVec == 1) return 2 * lane + vector;
    return lane * kVec + vector * (rotary_dim / 2);
  }
  FI_DEVICE int pair(int run) const {
    if constexpr (kInterleave) return lane * kHalf + run * (rotary_dim / 4);
    return lane * kVec + run * kHalf;
  }
};

template <int kPairs>
struct RopeAngles {
  float cosine[kPairs], sine[kPairs];
};

// From the table; a position outside it gives NaN.
template <class Lane>
FI_DEVICE void table_angles(const RopeRows& p, const Lane& lane, int64_t position, RopeAngles<Lane::kPairs>& angles) {
  const bool inside = position >= 0 && position < p.max_pos;
  const float* row = p.cos_sin + (inside ? position * p.cos_sin_row : 0);
#pragma unroll
  for (int run = 0; run < Lane::kRuns; ++run) {
    const auto c = load<float, Lane::kHalf>(row + lane.pair(run));
    const auto s = load<float, Lane::kHalf>(row + p.rotary_dim / 2 + lane.pair(run));
#pragma unroll
    for (int i = 0; i < Lane::kHalf; ++i) {
      angles.cosine[run * Lane::kHalf + i] = inside ? c.v[i] : __int_as_float(0x7fffffff);
      angles.sine[run * Lane::kHalf + i] = inside ? s.v[i] : __int_as_float(0x7fffffff);
    }
  }
}

// From the table, or computed: then prepare() does what does not depend on memory. Until its angle is known, the step
// of a pair lives in the registers of its cosine and sine.
template <class Lane>
struct RopeSource {
  const RopeParams& p;
  Lane lane;

  FI_DEVICE void prepare(RopeAngles<Lane::kPairs>& angles) const {
    if (p.rows.cos_sin) return;
#pragma unroll
    for (int run = 0; run < Lane::kRuns; ++run) {
      double turns = p.frequencies.turns(lane.pair(run));
#pragma unroll
      for (int i = 0; i < Lane::kHalf; ++i) {
        const uint64_t step = p.frequencies.step(turns);
        angles.cosine[run * Lane::kHalf + i] = __uint_as_float(static_cast<uint32_t>(step));
        angles.sine[run * Lane::kHalf + i] = __uint_as_float(static_cast<uint32_t>(step >> 32));
        turns *= p.frequencies.power[0];
      }
    }
  }
  FI_DEVICE int64_t position(int64_t row) const { return p.position(row); }
  FI_DEVICE void fill(int64_t position, RopeAngles<Lane::kPairs>& angles) const {
    if (p.rows.cos_sin) return table_angles(p.rows, lane, position, angles);
#pragma unroll
    for (int i = 0; i < Lane::kPairs; ++i) {
      const uint64_t step =
          static_cast<uint64_t>(__float_as_uint(angles.sine[i])) << 32 | __float_as_uint(angles.cosine[i]);
      const auto turn = static_cast<uint32_t>(static_cast<uint64_t>(position) * step >> 32);
      cos_sin_of_turn(turn, &angles.cosine[i], &angles.sine[i]);
    }
  }
};

template <int kVec, bool kInterleave>
FI_DEVICE void rotate(float (&a)[kVec], float (&b)[kVec], const RopeAngles<kVec>& angles) {
  const auto turn = [&](float& x, float& y, int pair) {
    const float x0 = x;
    x = x0 * angles.cosine[pair] - y * angles.sine[pair];
    y = y * angles.cosine[pair] + x0 * angles.sine[pair];
  };
  if constexpr (kInterleave && kVec > 1) {
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {
      turn(a[i], a[i + 1], i / 2);
      turn(b[i], b[i + 1], (kVec + i) / 2);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) turn(a[i], b[i], i);
  }
}

// This thread's share of the work: two vectors at `lane` of the heads group, group + groups, ... of one row.
struct RopeShare {
  uint32_t row, group;
  int lane;

  FI_DEVICE explicit RopeShare(const RopeRows& p) {
    const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    row = divide(index, p.lanes_and_groups);
    const uint32_t within = index - row * p.lanes_and_groups.value;
    group = divide(within, p.lanes);
    lane = within - group * p.lanes.value;
  }
};

// place(kind, part, row) gives the offset of a row in part.out, or -1 where it has no place.
template <class T, class O, int kUnroll, int kKinds, int kVec, bool kInterleave, class Source, class Place>
FI_DEVICE void rope_rows(const RopeRows& p, const RopeShare& share, const Source& source, const Place& place) {
  const int lane = share.lane, rotating = p.rotary_dim / (2 * kVec);
  const int64_t row = share.row;
  RopeAngles<kVec> angles;
  source.prepare(angles);
  pdl_wait();
  if (row >= p.rows) return;
  const int64_t position = lane < rotating ? source.position(row) : 0;
  bool ready = false;
  int head = share.group;
#pragma unroll 1
  for (int kind = 0; kind < kKinds; ++kind) {
    const int heads = p.heads[kind], first = head;
    if (head < heads) head += (heads - head + p.groups - 1) / p.groups * p.groups;
    head -= heads;
    const bool rotated = lane < rotating && kind != kRopeV;
    const int skipped = rotated || kind == kRopeV ? 0 : rotating;  // lanes of the rotated part
    const int at0 = rotated ? source.lane.at(0) : (lane - skipped) * kVec;
    const int at1 = rotated ? source.lane.at(1) : (lane + static_cast<int>(p.lanes.value) - 2 * skipped) * kVec;
    const int end = rotated ? p.rotary_dim : p.rest_dim[kind];
    if (first >= heads || at0 >= end) continue;
    const RopePart& part = rotated ? p.rotated[kind] : p.rest[kind];
    const int64_t to = place(kind, part, row);
    if (to < 0) continue;
    const T* in = static_cast<const T*>(part.in) + row * part.in_row + at0;
    O* out = static_cast<O*>(part.out) + to + at0;
    const int64_t in_head = part.in_head, out_head = part.out_head;
    const bool second = at1 < end;
    const float scale = p.scale[kind];
#pragma unroll 1
    for (int h = first; h < heads; h += kUnroll * p.groups) {
      Vec<T, kVec> x[kUnroll] = {}, y[kUnroll] = {};
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (h + u * p.groups < heads) {
          const T* from = in + (h + u * p.groups) * in_head;
          x[u] = load<T, kVec>(from);
          if (second) y[u] = load<T, kVec>(from + (at1 - at0));
        }
      pdl_launch_dependents();
      if (rotated && !ready) {
        source.fill(position, angles);
        ready = true;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (h + u * p.groups < heads) {
          O* target = out + (h + u * p.groups) * out_head;
          float a[kVec], b[kVec];
          to_float(x[u], a);
          to_float(y[u], b);
          if (rotated) rotate<kVec, kInterleave>(a, b, angles);
          if constexpr (kIsFp8<O>) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) a[i] *= scale, b[i] *= scale;
          }
          Vec<O, kVec> rounded;
          from_float(a, rounded);
          store(target, rounded);
          from_float(b, rounded);
          if (second) store(target + (at1 - at0), rounded);
        }
    }
  }
}

template <class T, int kVec, int kUnroll, bool kInterleave>
FI_DEVICE void rope(const RopeParams& p) {
  const RopeShare share(p.rows);
  const RopeSource<RopeLane<kVec, kInterleave>> source{p, {share.lane, p.rows.rotary_dim}};
  const auto place = [](int, const RopePart& part, int64_t row) { return row * part.out_row; };
  rope_rows<T, T, kUnroll, 2, kVec, kInterleave>(p.rows, share, source, place);
}

}  // namespace fi
