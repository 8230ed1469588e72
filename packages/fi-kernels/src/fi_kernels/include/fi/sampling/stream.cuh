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
  // All elements of a piece, in any order.
  FI_DEVICE void load(int begin, float (&x)[kEach]) const {
    if (whole(begin)) {
      uint4 words[kEach / kVec];
#pragma unroll
      for (int i = 0; i < kEach / kVec; ++i) words[i] = load_once(row + begin + (32 * i + lane()) * kVec);
#pragma unroll
      for (int i = 0; i < kEach; i += kVec) {
        Vec<T, kVec> some;
        float wide[kVec];
        memcpy(&some, &words[i / kVec], sizeof some);
        to_float(some, wide);
#pragma unroll
        for (int j = 0; j < kVec; ++j) x[i + j] = wide[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) x[i] = at(begin + 32 * i + lane());
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
  // The token of a piece with which the weights of its elements, summed in order, pass `rest` as a portion.
  FI_DEVICE int locate(int begin, const Weigher& weigher, Portion portion, uint64_t rest) const {
    uint64_t sum = 0;
#pragma unroll 2
    for (int i = 0; i < kEach / 2; ++i) {  // the first two wait for memory, the others find their lines in L1
      const int token = begin + kEach * lane() + i;
      sum += uint64_t{weigher.of(at(token))} + weigher.of(at(token + kEach / 2));
    }
    const uint64_t through = warp_scan(sum);
    const int owner = max(__ffs(__ballot_sync(0xffffffffu, portion.of(through) > rest)) - 1, 0);
    const uint64_t before = __shfl_sync(0xffffffffu, through - sum, owner);
    const int first = begin + kEach * owner;
    const uint64_t one = lane() < kEach ? weigher.of(at(first + lane())) : 0, up_to = before + warp_scan(one);
    return first + __ffs(__ballot_sync(0xffffffffu, portion.of(up_to) > rest)) - 1;
  }
};

// The piece in which sums over the n pieces pass a random share of them, and what is left of it there; by one warp,
// whose lanes own pieces in a row.
FI_DEVICE int choose_piece(const PieceSum* pieces, int n, bool first, uint64_t random, uint64_t& rest) {
  const int each = (n + 31) / 32 | 1;  // odd: other banks for other lanes
  const int from = min(static_cast<int>(threadIdx.x % 32) * each, n), to = min(from + each, n);
  uint64_t own = 0;
#pragma unroll 4
  for (int j = from; j < to; ++j) own += pieces[j].sum;
  const uint64_t through = warp_scan(own), total = __shfl_sync(0xffffffffu, through, 31);
  const uint64_t target = first ? 0 : uniform_below(total, random);
  const int owner = max(__ffs(__ballot_sync(0xffffffffu, through > target)) - 1, 0);
  rest = target - (through - own);
  int found = from;
  if (static_cast<int>(threadIdx.x % 32) == owner)
    while (pieces[found].sum <= rest) rest -= pieces[found++].sum;
  rest = __shfl_sync(0xffffffffu, rest, owner);
  return __shfl_sync(0xffffffffu, found, owner);
}

FI_DEVICE uint32_t largest_of(const PieceSum* pieces, int n) {
  uint32_t top = 0;
#pragma unroll 1
  for (int j = threadIdx.x % 32; j < n; j += 32) top = max(top, pieces[j].key);
  return __reduce_max_sync(0xffffffffu, top);
}

// One output: of a row without filters, or of one that filtered(row, pieces, n, random, lowest) draws from, given the
// keys of its quarters. Or it returns true, `lowest` is the smallest key that may be drawn, and the pieces have their
// weights. `pieces`: room in this block's shared memory for those of the row.
template <class T, class Team, int kWarps, class Filtered>
FI_DEVICE void stream_row(const SampleParams& p, PieceSum* pieces, int output, int64_t source, Filtered&& filtered) {
  Team::arrive();
  StreamedRow<T> row{static_cast<const T*>(p.input) + source * p.input_row, p.vocab, p.logits};
  const int n = (p.vocab + kPiece - 1) / kPiece, share = (n + Team::size() - 1) / Team::size();
  const int first = Team::rank() * share, last = min(first + share, n), warp = threadIdx.x / 32;
  const bool greedy = is_greedy(p, at(p.temperature, source)), plain = greedy || is_plain(p, source);
  if constexpr (sizeof(T) == 4) {
    if (is_adjusted(p)) row.row = adjust_in_global(p, row.row, first * kPiece, last * kPiece, output, source);
  }
  const float factor = row.logits ? logits_scale(0.f, at(p.temperature, source)).factor : 1.f;
  float x[StreamedRow<T>::kEach];
  int j = first + warp;
  if (j < last) row.load(j * kPiece, x);
  const uint64_t random = random_of(row_random(p, output));  // while the row is on its way
  Team::meet();
#pragma unroll 1
  while (j < last) {
    uint4 known;
    if (plain) {
      const uint32_t key = row.largest(x);
      const uint64_t sum = key ? warp_sum_u64(row.weigh(x, key, factor, greedy)) : 0;
      known = make_uint4(static_cast<uint32_t>(sum), static_cast<uint32_t>(sum >> 32), key, 0);
    } else {
      known = make_uint4(row.template largest<0, 4>(x), row.template largest<4, 8>(x), row.template largest<8, 12>(x),
                         row.template largest<12, 16>(x));
    }
    if (threadIdx.x % 32 == 0) Team::give(pieces[j], known);
    j += kWarps;
    if (j < last) row.load(j * kPiece, x);
  }
  if (!Team::gathered()) return;
  pdl_launch_dependents();
  uint32_t lowest = 0;
  if (!plain && !filtered(row, pieces, n, random, lowest)) return;
  const uint32_t top = largest_of(pieces, n);
  if (top == 0) {
    if (threadIdx.x == 0) put_token(p, output, 0, false);
    return;
  }
  const Scale scale = row.scale(top, at(p.temperature, source));
  const auto portion = [&](uint32_t key) {
    if (!plain || greedy) return Portion{key >= (greedy ? top : lowest), 0};
    return portion_of(value_of(key), scale, top == kInfinityKey, row.logits);
  };
  for (int j = threadIdx.x; j < n; j += kWarps * 32) {
    PieceSum& piece = pieces[j];
    piece.sum = piece.key ? portion(piece.key).of(piece.sum) : 0;
  }
  __syncthreads();
  if (warp != 0) return;
  uint64_t rest;
  const int found = choose_piece(pieces, n, greedy, random, rest);
  const uint32_t key = pieces[found].key;
  const Weigher weigher = plain ? row.weigher(key, factor, greedy) : Weigher{scale, value_of(lowest), 0, row.logits};
  const int token = row.locate(found * kPiece, weigher, portion(key), rest);
  if (threadIdx.x == 0) put_token(p, output, token, true);
}
struct NoneFiltered {
  template <class... A>
  FI_DEVICE bool operator()(A&&...) const {
    return false;
  }
};

}  // namespace sampling
}  // namespace fi
