// Reads a row from global memory by tiles, and computes tile maxima and tile weights for single-pass draws.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/sampling/adjust_logits.cuh"
#include "fi/sampling/cluster.cuh"
#include "fi/sampling/tile.h"

namespace fi {
namespace sampling {

FI_DEVICE void write_token(const SampleParams& p, int64_t output, int64_t token, bool valid) {
  if (p.int64_tokens)
    static_cast<int64_t*>(p.out)[output] = token;
  else
    static_cast<int32_t*>(p.out)[output] = static_cast<int32_t>(token);
  if (p.valid) p.valid[output] = valid;
}

constexpr uint32_t kInfinityKey = 0xff800000u;  // key_of(+inf)

// The weight of an element: relative to the row's scale (extra_shift 0) or to a tile's (4); 0 below `lowest` and of
// NaN.
struct WeightFunction {
  Scale scale;
  float lowest;
  uint32_t extra_shift;
  bool logits;

  FI_DEVICE uint32_t operator()(float x) const {
    const Weight w = logits ? logit_weight(x, scale) : prob_weight(x, scale);
    return x >= lowest ? shift_right(w.mantissa, w.shift + extra_shift) : 0u;
  }
};

// A row in global memory, in tiles that begin at its first element.
template <class T>
struct GlobalRow {
  static constexpr int kVec = 16 / sizeof(T), kPerLane = kTileSize / 32;  // elements of a tile per lane
  const T* row;
  int vocab;
  bool logits;

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE float at(int token) const {
    return token < vocab ? to_float(row[token]) : __int_as_float(0x7fffffff);  // NaN
  }
  // Whether a tile is loaded by 16-byte vectors.
  FI_DEVICE bool is_vectorised(int begin) const {
    return begin + kTileSize <= vocab && reinterpret_cast<uint64_t>(row) % 16 == 0;
  }
  // Loads this lane's elements of a tile, or of one of kParts parts of it, in an order that depends on alignment.
  // `reread`: the row is read again later, so its lines should stay in L2.
  template <int kParts = 1>
  FI_DEVICE void load(int begin, float (&x)[kPerLane / kParts], bool reread = false, int part = 0) const {
    constexpr int kCount = kPerLane / kParts;
    if (is_vectorised(begin)) {
      uint4 words[kCount / kVec];
      const T* from = row + begin + lane() * kVec + part * kCount * 32;
#pragma unroll
      for (int i = 0; i < kCount / kVec; ++i) words[i] = load_once(from + 32 * i * kVec, reread);
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
  // The max key of the elements [kBegin, kEnd) of all lanes: a tile, or one of its quarters. 0 if none has probability.
  template <int kBegin, int kEnd>
  FI_DEVICE uint32_t max_key(const float (&x)[kPerLane]) const {
    const float least = logits ? -__uint_as_float(kMaxFiniteBits) : __uint_as_float(kMinPositiveBits);
    float largest = x[kBegin];
#pragma unroll
    for (int i = kBegin + 1; i < kEnd; ++i) largest = fmaxf(largest, x[i]);
    return __reduce_max_sync(0xffffffffu, largest >= least ? key_of(largest) : 0u);
  }
  FI_DEVICE uint32_t max_key(const float (&x)[kPerLane]) const { return max_key<0, kPerLane>(x); }
  // The token of this lane's first element of a quarter; `step` is the distance to its next ones.
  FI_DEVICE int quarter(int tile, int quarter, int& step) const {
    const int begin = tile * kTileSize, per_lane = kPerLane / 4;
    step = is_vectorised(begin) ? 1 : 32;
    return step == 1 ? begin + (quarter * per_lane / kVec * 32 + lane()) * kVec + quarter * per_lane % kVec
                     : begin + quarter * per_lane * 32 + lane();
  }
  FI_DEVICE Scale scale(uint32_t max_key, float temperature) const {
    return logits ? logits_scale(value_of(max_key), temperature) : probs_scale(value_of(max_key));
  }
  // The weight function of a tile. `key`: the tile's max key; `greedy`: only elements equal to it have weight.
  FI_DEVICE WeightFunction weight_function(uint32_t key, float factor, bool greedy) const {
    const Scale s = tile_scale(value_of(key), factor, logits);
    return {s, greedy ? value_of(key) : s.lowest, 4, logits};
  }
  // Sums the weights of this lane's elements of a tile.
  FI_DEVICE uint32_t sum_weights(const float (&x)[kPerLane], uint32_t key, float factor, bool greedy) const {
    const WeightFunction weight = weight_function(key, factor, greedy);
    uint32_t sum = 0;
    if (greedy || key == kInfinityKey) {
      const uint32_t one = weight(value_of(key));
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum += x[i] == value_of(key) ? one : 0u;
    } else if (logits) {  // -inf and NaN have weight 0
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum += tile_weight(finite_weight(x[i], weight.scale));
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum += tile_weight(positive_weight(x[i], weight.scale));
    }
    return sum;
  }
};

}  // namespace sampling
}  // namespace fi
