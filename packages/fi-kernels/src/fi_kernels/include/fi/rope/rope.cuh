// Rotary embedding (Su et al. 2021, arXiv:2104.09864) on sm_80 and later: a thread computes the angles of its pairs
// once, then loops over heads with both elements of each pair in its own registers. An RMSNorm of each head comes first
// where it has weights.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/divisor.h"
#include "fi/rope/rope.h"

namespace fi {

// The elements and pairs of one lane: two vectors of kVec elements, which hold kPairs pairs. The pairs are one run from
// pair(0) on if kVec is 1; else two runs of kVec / 2 pairs, from pair(0) and from pair(1) on.
template <int kVec, bool kInterleave>
struct PairLayout {
  static constexpr int kPairs = kVec, kPairsPerRun = kVec == 1 ? 1 : kVec / 2, kPairRuns = kVec == 1 ? 1 : 2;
  int lane, rotary_dim;

  // Interleaved vectors are half the rotary width apart too, so that neighbouring lanes read neighbouring vectors.
  FI_DEVICE int offset(int vector) const {
    if constexpr (kInterleave && kVec == 1) return 2 * lane + vector;
    return lane * kVec + vector * (rotary_dim / 2);
  }
  FI_DEVICE int pair(int run) const {
    if constexpr (kInterleave) return lane * kPairsPerRun + run * (rotary_dim / 4);
    return lane * kVec + run * kPairsPerRun;
  }
};

template <int kPairs>
struct PairAngles {
  float cosine[kPairs], sine[kPairs];
};

// Reads the angles of a position from the cos_sin cache; a position outside the cache gives NaN.
template <class Layout>
FI_DEVICE void cached_angles(const RopeCommon& p, const Layout& layout, int64_t position,
                             PairAngles<Layout::kPairs>& angles) {
  const bool inside = position >= 0 && position < p.max_pos;
  const float* row = p.cos_sin + (inside ? position * p.cos_sin_stride : 0);
#pragma unroll
  for (int run = 0; run < Layout::kPairRuns; ++run) {
    const auto c = load<float, Layout::kPairsPerRun>(row + layout.pair(run));
    const auto s = load<float, Layout::kPairsPerRun>(row + p.rotary_dim / 2 + layout.pair(run));
#pragma unroll
    for (int i = 0; i < Layout::kPairsPerRun; ++i) {
      angles.cosine[run * Layout::kPairsPerRun + i] = inside ? c.v[i] : __int_as_float(0x7fffffff);
      angles.sine[run * Layout::kPairsPerRun + i] = inside ? s.v[i] : __int_as_float(0x7fffffff);
    }
  }
}

// Angles from the cos_sin cache, or computed. prepare() computes the phase steps, which depend on no memory, and parks
// the 64 bits of each in the registers of the pair's cosine and sine; compute() replaces them by the angle.
template <class Layout>
struct AngleSource {
  const RopeParams& p;
  Layout layout;

  FI_DEVICE void prepare(PairAngles<Layout::kPairs>& angles) const {
    if (p.common.cos_sin) return;
#pragma unroll
    for (int run = 0; run < Layout::kPairRuns; ++run) {
      double revolutions = p.frequencies.revolutions(layout.pair(run));
#pragma unroll
      for (int i = 0; i < Layout::kPairsPerRun; ++i) {
        const uint64_t step = p.frequencies.phase_step(revolutions);
        angles.cosine[run * Layout::kPairsPerRun + i] = __uint_as_float(static_cast<uint32_t>(step));
        angles.sine[run * Layout::kPairsPerRun + i] = __uint_as_float(static_cast<uint32_t>(step >> 32));
        revolutions *= p.frequencies.power[0];
      }
    }
  }
  FI_DEVICE int64_t position(int64_t row) const { return p.position(row); }
  FI_DEVICE void compute(int64_t position, PairAngles<Layout::kPairs>& angles) const {
    if (p.common.cos_sin) return cached_angles(p.common, layout, position, angles);
#pragma unroll
    for (int i = 0; i < Layout::kPairs; ++i) {
      const uint64_t step =
          static_cast<uint64_t>(__float_as_uint(angles.sine[i])) << 32 | __float_as_uint(angles.cosine[i]);
      const auto phase = static_cast<uint32_t>(static_cast<uint64_t>(position) * step >> 32);
      cos_sin_of_phase(phase, &angles.cosine[i], &angles.sine[i]);
    }
  }
};

// Rotates the pairs of vectors a and b: (x, y) becomes (x cos - y sin, y cos + x sin).
template <int kVec, bool kInterleave>
FI_DEVICE void rotate(float (&a)[kVec], float (&b)[kVec], const PairAngles<kVec>& angles) {
  const auto rotate_pair = [&](float& x, float& y, int pair) {
    const float x0 = x;
    x = x0 * angles.cosine[pair] - y * angles.sine[pair];
    y = y * angles.cosine[pair] + x0 * angles.sine[pair];
  };
  if constexpr (kInterleave && kVec > 1) {
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {
      rotate_pair(a[i], a[i + 1], i / 2);
      rotate_pair(b[i], b[i + 1], (kVec + i) / 2);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) rotate_pair(a[i], b[i], i);
  }
}

// What one thread processes: the two vectors at `lane` of the heads first_head, first_head + parallel_heads, ... of a
// row. Heads of q, k and v are numbered one after the other.
struct RopeThread {
  uint32_t row, first_head;
  int lane;

  FI_DEVICE explicit RopeThread(const RopeCommon& p) {
    const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    row = divide(index, p.threads_per_row);
    const uint32_t within = index - row * p.threads_per_row.value;
    first_head = divide(within, p.lanes);
    lane = within - first_head * p.lanes.value;
  }
};

// The sum of x over the lanes of a head, which are a power of two, aligned, in one warp.
FI_DEVICE float sum_over_head(float x, int lanes) {
  const unsigned all = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
  const unsigned mask = all << (threadIdx.x % 32 & ~(lanes - 1));
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(mask, x, offset);
  return x;
}

// Multiplies vectors a and b of a head by its factor and by the weights of their elements.
template <class T, int kVec>
FI_DEVICE void normalize(float (&a)[kVec], float (&b)[kVec], const Vec<T, kVec>& weight_a, const Vec<T, kVec>& weight_b,
                         const RopeCommon& p) {
  const int lanes = p.lanes.value;
  float squares = 0.f, wa[kVec], wb[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) squares += a[i] * a[i] + b[i] * b[i];
  const float factor = rsqrtf(sum_over_head(squares, lanes) / (2 * kVec * lanes) + p.eps);
  to_float(weight_a, wa);
  to_float(weight_b, wb);
#pragma unroll
  for (int i = 0; i < kVec; ++i) a[i] *= factor * wa[i], b[i] *= factor * wb[i];
}

// Rotates and converts the heads of one thread. kNorm: normalizes them first; no lane of a head is then idle, and each
// has both vectors. row_offset(kind, operand, row) returns the offset of a row in
// operand.out, or -1 if the row is not written.
template <class T, class O, int kUnroll, int kKinds, int kVec, bool kInterleave, bool kNorm = false, class Source,
          class RowOffset>
FI_DEVICE void rope_heads(const RopeCommon& p, const RopeThread& thread, const Source& source,
                          const RowOffset& row_offset) {
  const int lane = thread.lane, rope_lanes = p.rotary_dim / (2 * kVec);
  const int64_t row = thread.row;
  PairAngles<kVec> angles;
  source.prepare(angles);
  pdl_wait();
  if (row >= p.rows) return;
  const int64_t position = lane < rope_lanes ? source.position(row) : 0;
  bool ready = false;  // whether angles are computed
  int head = thread.first_head;
#pragma unroll 1
  for (int kind = 0; kind < kKinds; ++kind) {
    const int heads = p.heads[kind], first = head;
    if (head < heads) head += (heads - head + p.parallel_heads - 1) / p.parallel_heads * p.parallel_heads;
    head -= heads;
    const bool rotated = lane < rope_lanes && kind != kRopeV;
    const int skipped = rotated || kind == kRopeV ? 0 : rope_lanes;  // lanes before the first nope lane
    const int offset0 = rotated ? source.layout.offset(0) : (lane - skipped) * kVec;
    const int offset1 =
        rotated ? source.layout.offset(1) : (lane + static_cast<int>(p.lanes.value) - 2 * skipped) * kVec;
    const int end = rotated ? p.rotary_dim : p.nope_dim[kind];
    if (first >= heads || offset0 >= end) continue;
    const RopeOperand& operand = rotated ? p.rope[kind] : p.nope[kind];
    const int64_t out_offset = row_offset(kind, operand, row);
    if (out_offset < 0) continue;
    const T* in = static_cast<const T*>(operand.in) + row * operand.in_row_stride + offset0;
    O* out = static_cast<O*>(operand.out) + out_offset + offset0;
    const int64_t in_head_stride = operand.in_head_stride, out_head_stride = operand.out_head_stride;
    const bool second = offset1 < end;  // whether the second vector is inside the row
    const float scale = p.scale[kind];
    Vec<T, kVec> weight_a = {}, weight_b = {};
    const bool normed = kKinds < 3 || kind != kRopeV;
    if (kNorm && normed) {
      const T* weight = static_cast<const T*>(p.weight[kind]) + (rotated ? 0 : p.rotary_dim);
      weight_a = load<T, kVec>(weight + offset0);
      weight_b = load<T, kVec>(weight + offset1);
    }
#pragma unroll 1
    for (int h = first; h < heads; h += kUnroll * p.parallel_heads) {
      Vec<T, kVec> x[kUnroll] = {}, y[kUnroll] = {};
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (h + u * p.parallel_heads < heads) {
          const T* src = in + (h + u * p.parallel_heads) * in_head_stride;
          x[u] = load<T, kVec>(src);
          if (second) y[u] = load<T, kVec>(src + (offset1 - offset0));
        }
      pdl_launch_dependents();
      if (rotated && !ready) {
        source.compute(position, angles);
        ready = true;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (h + u * p.parallel_heads < heads) {
          O* dst = out + (h + u * p.parallel_heads) * out_head_stride;
          float a[kVec], b[kVec];
          to_float(x[u], a);
          to_float(y[u], b);
          if constexpr (kNorm)
            if (normed) normalize(a, b, weight_a, weight_b, p);
          if (rotated) rotate<kVec, kInterleave>(a, b, angles);
          if constexpr (kIsFp8<O>) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) a[i] *= scale, b[i] *= scale;
          }
          Vec<O, kVec> out_vec;
          from_float(a, out_vec);
          store(dst, out_vec);
          from_float(b, out_vec);
          if (second) store(dst + (offset1 - offset0), out_vec);
        }
    }
  }
}

template <class T, int kVec, int kUnroll, bool kInterleave, bool kNorm = false, int kKinds = 2>
FI_DEVICE void rope(const RopeParams& p) {
  const RopeThread thread(p.common);
  const AngleSource<PairLayout<kVec, kInterleave>> source{p, {thread.lane, p.common.rotary_dim}};
  const auto row_offset = [&](int kind, const RopeOperand& operand, int64_t row) {
    return kKinds == 3 ? p.place(kind, operand, row) : row * operand.out_row_stride;
  };
  rope_heads<T, T, kUnroll, kKinds, kVec, kInterleave, kNorm>(p.common, thread, source, row_offset);
}

template <class T, int kVec, int kUnroll, bool kInterleave>
FI_DEVICE void norm_rope(const RopeParams& p) {
  rope<T, kVec, kUnroll, kInterleave, true>(p);
}

// Writes k and v into the pages of a cache.
template <class T, int kVec, int kUnroll, bool kInterleave>
FI_DEVICE void norm_rope_append(const RopeParams& p) {
  rope<T, kVec, kUnroll, kInterleave, true, 3>(p);
}

}  // namespace fi
