// Defines tiles of 512 tokens, whose weight sums a draw in one pass over the row uses; bit-identical on CPU and CUDA.
#pragma once
#include "fi/ordered.h"
#include "fi/sampling/sample.h"

namespace fi::sampling {

// Weights of a tile are relative to the tile's own maximum, so a tile is summed as soon as it is read. Once the row
// maximum is known, the sums are rescaled to it, as online softmax does. Tile 0 begins at the row's first element,
// whatever its address.
struct alignas(16) TileSum {
  uint64_t sum;      // of weights; the tile's scale has weight 2^27, so the sum is below 2^37
  uint32_t max_key;  // ordered bits of the maximum; 0 if no element has probability
  uint32_t unused;
};
// The ordered maxima of the four quarters of a tile. Top-k rows store these instead of a TileSum.
struct alignas(16) QuarterMaxKeys {
  uint32_t key[4];
};
static_assert(sizeof(TileSum) == kTileSumBytes, "kTileSumBytes is the size of a TileSum");

// The scale of a tile with maximum `largest`. `factor`: the row's factor, for logits.
FI_EXACT Scale tile_scale(float largest, float factor, bool logits) {
  if (!logits) return probs_scale(largest);
  const bool infinite = bits_of(largest) == kInfinityBits;
  return {infinite ? from_bits(kMaxFiniteBits) : largest, factor, infinite ? largest : -from_bits(kMaxFiniteBits)};
}
// 2^27 where a row weight is 2^31.
FI_EXACT uint32_t tile_weight(Weight w) { return shift_right(w.mantissa, w.shift + 4); }

// Converts a tile's sum to the row's scale: sum * factor >> shift, below 2^44.
struct Rescale {
  uint32_t factor;  // at most 2^24
  uint32_t shift;

  FI_EXACT uint64_t apply(uint64_t sum) const { return shift_right(sum * factor, shift); }
};
// The rescale factor of a tile with maximum `largest`. `row`: the row's scale; `infinite`: the row contains +inf, which
// takes all probability.
FI_EXACT Rescale rescale_of_tile(float largest, const Scale& row, bool infinite, bool logits) {
  constexpr uint32_t one = 1u << 23, round = 17;
  if (infinite) return {bits_of(largest) == kInfinityBits ? one : 0u, round};
  if (!logits) {
    // Subnormals count as exponent 1, as in probs_scale.
    const uint32_t exponent = bits_of(largest) >> 23, highest = bits_of(row.maximum) >> 23;
    return {one, round + (highest ? highest : 1) - (exponent ? exponent : 1)};
  }
  const SplitExp2 p = split_exp2(add_rn(row.maximum, -largest), row.factor);
  if (p.shift >= 64) return {0u, round};
  return {static_cast<uint32_t>(mul_rn(p.y, 0x1p23f)), round + p.shift};
}

// Whether a draw applies no filter to the row. Greedy rows, which take the first of the largest, are a separate case.
FI_EXACT bool is_unfiltered(const SampleParams& p, int64_t row) {
  const int32_t k = at(p.top_k, row);
  return p.output == kDrawToken && (k <= 0 || k >= p.vocab) && at(p.top_p, row) >= 1.0f && !(at(p.min_p, row) > 0.0f);
}
// Whether top-p alone, from one half on, filters the row. Such a row is drawn by rejection sampling: kProposals tokens
// at a time are drawn from the whole row, and the first in the top-p set is accepted. If kRounds rounds accept none
// (for p = 0.5, one row in 65536), one more random number draws from the top-p set itself.
constexpr int kProposals = 4, kRounds = 4;
FI_EXACT bool uses_top_p_rejection(int32_t k, float top_p, float min_p, int32_t vocab) {
  return (k <= 0 || k >= vocab) && top_p >= 0.5f && top_p < 1.0f && !(min_p > 0.0f);
}
FI_EXACT bool uses_top_p_rejection(const SampleParams& p, int64_t row) {
  return p.output == kDrawToken && !is_greedy(p, at(p.temperature, row)) &&
         uses_top_p_rejection(at(p.top_k, row), at(p.top_p, row), at(p.min_p, row), p.vocab);
}
// Whether tile sums or quarter maxima suffice for the draw, so that the row is read once: no filter, rejection
// sampling, or a k so small that the k largest elements are probably in fewer than half of the quarters.
FI_EXACT bool is_single_pass(int32_t k, float top_p, float min_p, int32_t vocab, bool joint) {
  if (k <= 0 || k >= vocab) return top_p >= 0.5f && !(min_p > 0.0f);
  return k <= 128 && k * (kTileSize / 2) <= vocab && (top_p >= 1.0f || !joint);
}
FI_EXACT bool is_single_pass(const SampleParams& p, int64_t row) {
  return is_greedy(p, at(p.temperature, row)) ||
         is_single_pass(at(p.top_k, row), at(p.top_p, row), at(p.min_p, row), p.vocab, p.joint);
}

}  // namespace fi::sampling
