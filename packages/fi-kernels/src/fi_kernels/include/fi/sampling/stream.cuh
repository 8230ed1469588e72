// Draws in one read of a row: its pieces are summed as they come, and the first block of a team looks at one again.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/sampling/adjust.cuh"
#include "fi/sampling/piece.h"
#include "fi/sampling/team.cuh"

namespace fi {
namespace sampling {

FI_DEVICE void put_token(const SampleParams& p, int64_t output, int64_t token, bool valid) {
  if (p.wide_tokens)
    static_cast<int64_t*>(p.out)[output] = token;
  else
    static_cast<int32_t*>(p.out)[output] = static_cast<int32_t>(token);
  if (p.valid) p.valid[output] = valid;
}

constexpr uint32_t kInfinityKey = 0xff800000u;  // key_of(+inf)

// Weights by the scale of a row, or (finer = 4) of a piece; 0 below `lowest`, and of no number.
struct Weigher {
  Scale scale;
  float lowest;
  uint32_t finer;
  bool logits;

  FI_DEVICE uint32_t of(float x) const {
    const Weight w = logits ? logit_weight(x, scale) : prob_weight(x, scale);
    return x >= lowest ? shifted(w.mantissa, w.shift + finer) : 0u;
  }
};

// A row in global memory.
template <class T>
struct StreamedRow {
  static constexpr int kVec = 16 / sizeof(T), kEach = kPiece / 32;  // elements of a piece for a lane
  const T* row;
  int vocab;
  bool logits;

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE float at(int token) const {
    return token < vocab ? to_float(row[token]) : __int_as_float(0x7fffffff);  // NaN
  }
  // Whether a piece is loaded by vectors.
  FI_DEVICE bool whole(int begin) const { return begin + kPiece <= vocab && reinterpret_cast<uint64_t>(row) % 16 == 0; }
  // All elements of a piece, in any order, or of a part of it. again: they will be read once more.
  template <int kParts = 1>
  FI_DEVICE void load(int begin, float (&x)[kEach / kParts], bool again = false, int part = 0) const {
    constexpr int kCount = kEach / kParts;
    if (whole(begin)) {
      uint4 words[kCount / kVec];
      const T* from = row + begin + lane() * kVec + part * kCount * 32;
#pragma unroll
      for (int i = 0; i < kCount / kVec; ++i) words[i] = load_once(from + 32 * i * kVec, again);
#pragma unroll
      for (int i = 0; i < kCount; i += kVec) {
        Vec<T, kVec> some;
        float wide[kVec];
        memcpy(&some, &words[i / kVec], sizeof some);
        to_float(some, wide);
#pragma unroll
        for (int j = 0; j < kVec; ++j) x[i + j] = wide[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = at(begin + 32 * (part * kCount + i) + lane());
    }
  }
  // Of a piece, or of a quarter of it: those elements of each lane.
  template <int kBegin, int kEnd>
  FI_DEVICE uint32_t largest(const float (&x)[kEach]) const {
    const float least = logits ? -__uint_as_float(kLargest) : __uint_as_float(kSmallest);
    float largest = x[kBegin];
#pragma unroll
    for (int i = kBegin + 1; i < kEnd; ++i) largest = fmaxf(largest, x[i]);
    return __reduce_max_sync(0xffffffffu, largest >= least ? key_of(largest) : 0u);
  }
  FI_DEVICE uint32_t largest(const float (&x)[kEach]) const { return largest<0, kEach>(x); }
  // The token of the first of a lane's elements of a quarter, and how far apart they are.
  FI_DEVICE int quarter(int piece, int quarter, int& step) const {
    const int begin = piece * kPiece, each = kEach / 4;
    step = whole(begin) ? 1 : 32;
    return step == 1 ? begin + (quarter * each / kVec * 32 + lane()) * kVec + quarter * each % kVec
                     : begin + quarter * each * 32 + lane();
  }
  FI_DEVICE Scale scale(uint32_t top, float temperature) const {
    return logits ? logits_scale(value_of(top), temperature) : probs_scale(value_of(top));
  }
  // key: of the largest of the piece; only: no others count.
  FI_DEVICE Weigher weigher(uint32_t key, float factor, bool only) const {
    const Scale s = piece_scale(value_of(key), factor, logits);
    return {s, only ? value_of(key) : s.lowest, 4, logits};
  }
  // A lane's part of the sum of a piece.
  FI_DEVICE uint32_t weigh(const float (&x)[kEach], uint32_t key, float factor, bool only) const {
    const Weigher weigher = this->weigher(key, factor, only);
    uint32_t sum = 0;
    if (only || key == kInfinityKey) {
      const uint32_t one = weigher.of(value_of(key));
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += x[i] == value_of(key) ? one : 0u;
    } else if (logits) {  // -inf and NaN weigh nothing
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += piece_weight(finite_weight(x[i], weigher.scale));
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += piece_weight(positive_weight(x[i], weigher.scale));
    }
    return sum;
  }
};

}  // namespace sampling
}  // namespace fi
