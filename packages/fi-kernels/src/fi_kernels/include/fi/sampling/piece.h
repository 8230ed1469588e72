// Pieces of 512 tokens of a row, which a draw without filters adds up: the same bits on every device.
#pragma once
#include "fi/ordered.h"
#include "fi/sampling/sample.h"

namespace fi::sampling {

// Each piece weighs its elements by its own largest, so that it is summed as soon as it is read, and the pieces are
// then weighed by the largest of the row. They begin with the row, wherever it lies.
struct alignas(16) PieceSum {
  uint64_t sum;  // of weights, 2^27 for the scale of the piece: below 2^37
  uint32_t key;  // of the largest element, ordered; 0 where none has probability
  uint32_t unused;
};
// Where a row is drawn from its largest elements: the keys of the largest of each quarter instead.
struct alignas(16) PieceKeys {
  uint32_t of[4];
};
static_assert(sizeof(PieceSum) == kPieceRoom, "as the launcher counts");

// factor: that of the row, for logits.
FI_EXACT Scale piece_scale(float largest, float factor, bool logits) {
  if (!logits) return probs_scale(largest);
  const bool infinite = bits_of(largest) == kInfinity;
  return {infinite ? of_bits(kLargest) : largest, factor, infinite ? largest : -of_bits(kLargest)};
}
FI_EXACT uint32_t piece_weight(Weight w) { return shifted(w.mantissa, w.shift + 4); }  // 2^27 for 2^31 of a row's

// What the sum of a piece counts in its row: sum * factor >> shift, below 2^44.
struct Portion {
  uint32_t factor;  // at most 2^24
  uint32_t shift;

  FI_EXACT uint64_t of(uint64_t sum) const { return shifted(sum * factor, shift); }
};
// row: the scale of the row, and `infinite` that it has +inf, beside which nothing else counts.
FI_EXACT Portion portion_of(float largest, const Scale& row, bool infinite, bool logits) {
  constexpr uint32_t one = 1u << 23, round = 17;
  if (infinite) return {bits_of(largest) == kInfinity ? one : 0u, round};
  if (!logits) {
    const uint32_t exponent = bits_of(largest) >> 23, highest = bits_of(row.top) >> 23;  // as probs_scale takes them
    return {one, round + (highest ? highest : 1) - (exponent ? exponent : 1)};
  }
  const Power p = power(plus(row.top, -largest), row.factor);
  if (p.shift >= 64) return {0u, round};
  return {static_cast<uint32_t>(times(p.y, 0x1p23f)), round + p.shift};
}

// Rows of a draw that have no filter. One that is greedy takes the first of the largest.
FI_EXACT bool is_plain(const SampleParams& p, int64_t row) {
  const int32_t k = at(p.top_k, row);
  return p.output == kDrawToken && (k <= 0 || k >= p.vocab) && at(p.top_p, row) >= 1.0f && !(at(p.min_p, row) > 0.0f);
}
// Rows of which the largest elements are wanted that have a share of the weight, half of it or more. Tokens are drawn
// from all of the row, kDraws at a time, and the first is taken that is one of those elements. Where no turn brings
// one, which for a half happens to one row in 65536, one more random number draws from those elements alone.
constexpr int kDraws = 4, kTurns = 4;
FI_EXACT bool is_share(int32_t k, float top_p, float min_p, int32_t vocab) {
  return (k <= 0 || k >= vocab) && top_p >= 0.5f && top_p < 1.0f && !(min_p > 0.0f);
}
FI_EXACT bool is_share(const SampleParams& p, int64_t row) {
  return p.output == kDrawToken && !is_greedy(p, at(p.temperature, row)) &&
         is_share(at(p.top_k, row), at(p.top_p, row), at(p.min_p, row), p.vocab);
}
// Rows whose sums or largest elements by piece tell enough to draw: those without a filter, those of a share, and those
// with a k so small that the k largest elements are probably in fewer than half of the quarters of pieces.
FI_EXACT bool is_streamed(int32_t k, float top_p, float min_p, int32_t vocab, bool joint) {
  if (k <= 0 || k >= vocab) return top_p >= 0.5f && !(min_p > 0.0f);
  return k <= 128 && k * (kPiece / 2) <= vocab && (top_p >= 1.0f || !joint);
}
FI_EXACT bool is_streamed(const SampleParams& p, int64_t row) {
  return is_greedy(p, at(p.temperature, row)) ||
         is_streamed(at(p.top_k, row), at(p.top_p, row), at(p.min_p, row), p.vocab, p.joint);
}

}  // namespace fi::sampling
