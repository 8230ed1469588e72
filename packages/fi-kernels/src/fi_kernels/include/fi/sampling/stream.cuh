// Draws in one read of a row: its pieces are summed as they come, and the last block of a team looks at one again.
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
  // All elements of a piece, in any order.
  FI_DEVICE void load(int begin, float (&x)[kEach]) const {
    if (begin + kPiece <= vocab && reinterpret_cast<uint64_t>(row) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kEach; i += kVec) {
        float some[kVec];
        to_float(fi::load<T, kVec>(row + begin + 32 * i + lane() * kVec), some);
#pragma unroll
        for (int j = 0; j < kVec; ++j) x[i + j] = some[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) x[i] = at(begin + 32 * i + lane());
    }
  }
  FI_DEVICE float least() const { return logits ? -__uint_as_float(kLargest) : __uint_as_float(kSmallest); }
  FI_DEVICE uint32_t largest(const float (&x)[kEach]) const {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) largest = fmaxf(largest, x[i]);
    return __reduce_max_sync(0xffffffffu, largest >= least() ? key_of(largest) : 0u);
  }
  // The weight of an element of a piece that has no infinite ones, by its scale; of no number, 0.
  FI_DEVICE static uint32_t logit_part(float x, const Scale& s) { return piece_weight(finite_weight(x, s)); }
  FI_DEVICE static uint32_t prob_part(float x, const Scale& s) {
    const uint32_t z = bits_of(times(x, s.factor));
    return piece_weight({z << 8 | 0x80000000u, 127 - (z >> 23)});
  }
  // What each lane's part of n elements of a piece adds up to; `only`: the largest alone count.
  template <int kN>
  FI_DEVICE uint32_t weigh(const float (&x)[kN], uint32_t key, float factor, bool only) const {
    const float largest = value_of(key);
    uint32_t sum = 0;
    if (only || key == 0xff800000u) {  // of +inf
#pragma unroll
      for (int i = 0; i < kN; ++i) sum += x[i] == largest ? 1u << 27 : 0u;
      return sum;
    }
    const Scale s = piece_scale(largest, factor, logits);
    if (logits) {
#pragma unroll
      for (int i = 0; i < kN; ++i) sum += logit_part(x[i], s);
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) sum += prob_part(x[i], s);
    }
    return sum;
  }
  // The token of a piece with which the sum in their order, as a portion of the row, passes `rest`.
  FI_DEVICE int locate(int begin, uint32_t key, float factor, bool only, Portion portion, uint64_t rest) const {
    float x[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = at(begin + kEach * lane() + i);
    const uint64_t sum = weigh(x, key, factor, only), through = warp_scan(sum);
    const int owner = __ffs(__ballot_sync(0xffffffffu, portion.of(through) > rest)) - 1;
    const uint64_t before = __shfl_sync(0xffffffffu, through - sum, max(owner, 0));
    const int first = begin + kEach * max(owner, 0);
    const float one[1] = {at(first + min(lane(), kEach - 1))};
    const uint64_t up_to = before + warp_scan(uint64_t{lane() < kEach ? weigh(one, key, factor, only) : 0u});
    return first + __ffs(__ballot_sync(0xffffffffu, portion.of(up_to) > rest)) - 1;
  }
};

// By one warp, of what the team found: the token of a row without filters.
template <class T>
FI_DEVICE void draw_piece(const SampleParams& p, const StreamedRow<T>& row, PieceSum* pieces, int n, float temperature,
                          bool greedy, int output) {
  const uint64_t random = random_of(row_random(p, output));
  const int lane = threadIdx.x % 32, each = (n + 31) / 32 | 1, from = min(lane * each, n), to = min(from + each, n);
  uint32_t top = 0;
#pragma unroll 1
  for (int j = from; j < to; ++j) top = max(top, pieces[j].key);
  top = __reduce_max_sync(0xffffffffu, top);
  if (top == 0) {
    if (lane == 0) put_token(p, output, 0, false);
    return;
  }
  const Scale scale = row.logits ? logits_scale(value_of(top), temperature) : probs_scale(value_of(top));
  const auto portion = [&](uint32_t key) {
    if (greedy) return Portion{key == top ? 1u << 23 : 0u, 17};
    return portion_of(value_of(key), scale, top == 0xff800000u, row.logits);
  };
  uint64_t own = 0;
#pragma unroll 1
  for (int j = from; j < to; ++j) {
    PieceSum& piece = pieces[j];
    piece.sum = piece.key ? portion(piece.key).of(piece.sum) : 0;
    own += piece.sum;
  }
  const uint64_t through = warp_scan(own), total = __shfl_sync(0xffffffffu, through, 31);
  const uint64_t target = greedy ? 0 : uniform_below(total, random);
  const int owner = __ffs(__ballot_sync(0xffffffffu, through > target)) - 1;
  uint64_t rest = target - (through - own);
  int found = from;
  if (lane == owner)
    while (pieces[found].sum <= rest) rest -= pieces[found++].sum;
  found = __shfl_sync(0xffffffffu, found, owner);
  rest = __shfl_sync(0xffffffffu, rest, owner);
  const uint32_t key = pieces[found].key;
  const int token = row.locate(found * kPiece, key, scale.factor, greedy, portion(key), rest);
  if (lane == 0) put_token(p, output, token, true);
}

// One output of a row without filters. `pieces`: room in this block's shared memory for those of the row.
template <class T, class Team, int kWarps>
FI_DEVICE void stream_row(const SampleParams& p, PieceSum* pieces, int output, int64_t source) {
  Team::arrive();
  StreamedRow<T> row{static_cast<const T*>(p.input) + source * p.input_row, p.vocab, p.logits};
  const int n = (p.vocab + kPiece - 1) / kPiece, share = (n + Team::size() - 1) / Team::size();
  const int first = Team::rank() * share, last = min(first + share, n), warp = threadIdx.x / 32;
  const float temperature = at(p.temperature, source);
  const bool greedy = is_greedy(p, temperature);
  if constexpr (sizeof(T) == 4) {
    if (is_adjusted(p)) row.row = adjust_in_global(p, row.row, first * kPiece, last * kPiece, output, source);
  }
  const float factor = row.logits ? logits_scale(0.f, temperature).factor : 1.f;
  float x[StreamedRow<T>::kEach];
  int j = first + warp;
  if (j < last) row.load(j * kPiece, x);
  Team::meet();
#pragma unroll 1
  while (j < last) {
    const uint32_t key = row.largest(x);
    const uint64_t sum = key ? warp_sum_u64(row.weigh(x, key, factor, greedy)) : 0;
    if (threadIdx.x % 32 == 0) Team::give(pieces[j], {sum, key, 0});
    j += kWarps;
    if (j < last) row.load(j * kPiece, x);
  }
  if (!Team::gathered()) return;
  pdl_launch_dependents();
  if (warp == 0) draw_piece(p, row, pieces, n, temperature, greedy, output);
}

}  // namespace sampling
}  // namespace fi
