// Declares the parameters of sample: filter rows by top-k, top-p and min-p, then draw a token, renormalise or mask.
#pragma once
#include "fi/sampling/weight.h"
#include "fi/types.h"

namespace fi {

// One number for all rows, or one per row.
struct PerRowFloat {
  const float* rows;
  float value;
};
struct PerRowInt {
  const int32_t* rows;
  int32_t value;
};
struct PerRowSeed {
  const uint64_t* rows;
  uint64_t value;
  int64_t step;  // 0 if one element serves all rows
};

// Tokens of a tile, which one warp processes at a time: enough loads in flight, and one comparison to skip them all.
constexpr int kTileSize = 512;
// Shared memory of a warp's candidate list.
constexpr int kWarpListBytes = 288 * 4;
// Shared memory of a tile's sum or quarter maxima.
constexpr int kTileSumBytes = 16;

enum SampleOutput : int32_t { kDrawToken = 0, kRenormalise = 1, kMaskOut = 2 };

struct SampleParams {
  const void* input;
  void* out;  // tokens [rows], or rows of values [rows, vocab]
  uint8_t* valid;
  const void* indices;
  const float* bias;          // added to logits
  const uint32_t* bitmask;    // bit t % 32 of word t / 32: whether token t is allowed
  const int32_t* seen;        // tokens of prompt and output, each once; -1 in free slots
  const int32_t* seen_count;  // how often each of them was generated
  float* adjusted;            // adjusted logits, where they are not cached in shared memory
  PerRowFloat temperature, top_p, min_p, repetition, presence, frequency;
  PerRowInt top_k;
  PerRowSeed seed, offset;
  int64_t input_stride, out_stride, bias_stride, bitmask_stride, seen_stride, adjusted_stride;
  int64_t input_rows;
  int32_t rows, vocab, seen_slots;
  // Slots of a CTA, of a warp, and cached slots of a warp (softmax: cached tiles); slots are multiples of the tile
  // size.
  int32_t cta_slots, warp_slots, warp_cached;
  int32_t prefetch_rows;  // distance in rows of the row to prefetch into L2; 0: no prefetch
  int32_t output;
  bool single_pass;  // the single-pass kernel samples the rows of `is_single_pass`
  bool logits, joint, int64_indices, int64_tokens, float32_out, per_row_seeds;
};

namespace sampling {

FI_EXACT float at(const PerRowFloat& p, int64_t row) { return p.rows ? p.rows[row] : p.value; }
FI_EXACT int32_t at(const PerRowInt& p, int64_t row) { return p.rows ? p.rows[row] : p.value; }
FI_EXACT uint64_t at(const PerRowSeed& p, int64_t row) { return p.rows ? p.rows[row * p.step] : p.value; }

// Whether the row exists and its temperature is not NaN.
FI_EXACT bool is_drawable(const SampleParams& p, int64_t row) {
  if (row < 0 || row >= p.input_rows) return false;
  return p.output != kDrawToken || at(p.temperature, row) == at(p.temperature, row);
}

// The input row of an output, which may be out of range.
FI_EXACT int64_t input_row(const SampleParams& p, int64_t row) {
  if (!p.indices) return row;
  return p.int64_indices ? static_cast<const int64_t*>(p.indices)[row] : static_cast<const int32_t*>(p.indices)[row];
}

// 128 random bits of an output row. The row is part of the Philox counter unless it has its own seed and offset.
FI_EXACT Random row_random(const SampleParams& p, int64_t row, uint32_t further = 0) {
  const uint64_t own = p.per_row_seeds ? 0 : static_cast<uint64_t>(row);
  return philox(at(p.seed, row), at(p.offset, row), own | uint64_t{further} << 32);
}
// The i-th 64-bit random number of a row.
FI_EXACT uint64_t random_number(const SampleParams& p, int64_t row, uint32_t i) {
  const Random r = row_random(p, row, i / 2);
  return i % 2 ? uint64_t{r.x[3]} << 32 | r.x[2] : random_u64(r);
}

// Whether the row is greedy: temperature 0 takes the first of the largest logits.
FI_EXACT bool is_greedy(const SampleParams& p, float temperature) {
  return p.logits && p.output == kDrawToken && temperature <= 0.0f;
}

// The min-p threshold: elements at or above it have at least m times the largest probability.
FI_EXACT float min_p_bound(const Scale& s, float m, bool logits) {
  if (!(m > 0.0f)) return s.lowest;
  if (!logits) {
    float bound = mul_rn(s.maximum, m);
    // The product was rounded down: take the next number.
    if (fma_rn(s.maximum, m, -bound) > 0.0f) bound = from_bits(bits_of(bound) + 1);
    return bound > s.lowest ? bound : s.lowest;
  }
  if (s.factor == 0.0f) return s.lowest;
  const float bound = add_rn(s.maximum, log2_of(m < 0x1p-100f ? 0x1p-100f : m) / s.factor);
  return bound > s.lowest ? bound : s.lowest;
}

// Applies the repetition penalty (Keskar et al. 2019, arXiv:1909.05858), then frequency and presence penalties.
FI_EXACT float penalised_logit(float x, float repetition, float frequency, float presence, int32_t count) {
  x = x > 0.0f ? x / repetition : mul_rn(x, repetition);
  if (count > 0) x = add_rn(x, -add_rn(mul_rn(frequency, static_cast<float>(count)), presence));
  return x;
}

}  // namespace sampling
}  // namespace fi
