// The parameters of sample: filter rows by k, p and min-p, then draw a token, renormalise, or mask.
#pragma once
#include "fi/sampling/weight.h"
#include "fi/types.h"

namespace fi {

// A number for all rows, or one a row.
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
  int64_t step;  // 0: one element for all rows
};

// Slots that a warp takes at once: enough loads in flight, and one decision to skip them.
constexpr int kPiece = 512;
// Bytes of shared memory for each warp beside its slots: of elements that a threshold may be among.
constexpr int kListRoom = 288 * 4;
// And for what is known of a piece of a row that is not held.
constexpr int kPieceRoom = 16;

enum SampleOutput : int32_t { kDrawToken = 0, kRenormalise = 1, kMaskOut = 2 };

struct SampleParams {
  const void* input;
  void* out;  // tokens [rows], or rows of values
  uint8_t* valid;
  const void* indices;
  const float* bias;          // added to logits
  const uint32_t* bitmask;    // bit t % 32 of word t / 32: whether token t may be drawn
  const int32_t* seen;        // tokens that were there before, each once, -1 where there is none
  const int32_t* seen_count;  // how often each of them was generated
  float* adjusted;            // where logits go that were changed, if they are not kept on chip
  PerRowFloat temperature, top_p, min_p, repetition, presence, frequency;
  PerRowInt top_k;
  PerRowSeed seed, offset;
  int64_t input_row, out_row, bias_row, bitmask_row, seen_row, adjusted_row;
  int64_t input_rows;
  int32_t rows, vocab, seen_slots;
  int32_t slice, share, held;  // slots of a block, of a warp, and of these in shared memory; whole pieces
  int32_t ahead;               // how many rows further on lies the one to prefetch; 0: none
  int32_t output;
  bool streamed;  // another launch takes the rows that is_streamed names
  bool logits, joint, wide_indices, wide_tokens, wide_out, per_row_random;
};

namespace sampling {

FI_EXACT float at(const PerRowFloat& p, int64_t row) { return p.rows ? p.rows[row] : p.value; }
FI_EXACT int32_t at(const PerRowInt& p, int64_t row) { return p.rows ? p.rows[row] : p.value; }
FI_EXACT uint64_t at(const PerRowSeed& p, int64_t row) { return p.rows ? p.rows[row * p.step] : p.value; }

// Whether a row can be drawn from at all: not by a temperature that is NaN.
FI_EXACT bool is_drawable(const SampleParams& p, int64_t row) {
  if (row < 0 || row >= p.input_rows) return false;
  return p.output != kDrawToken || at(p.temperature, row) == at(p.temperature, row);
}

// The row that is read for an output; -1 if there is no such row.
FI_EXACT int64_t source_row(const SampleParams& p, int64_t row) {
  if (!p.indices) return row;
  return p.wide_indices ? static_cast<const int64_t*>(p.indices)[row] : static_cast<const int32_t*>(p.indices)[row];
}

// 128 bits of the row of the output: the row counts itself into the sequence unless it has a seed and offset of its
// own.
FI_EXACT Random row_random(const SampleParams& p, int64_t row, uint32_t further = 0) {
  const uint64_t own = p.per_row_random ? 0 : static_cast<uint64_t>(row);
  return philox(at(p.seed, row), at(p.offset, row), own | uint64_t{further} << 32);
}
// The i-th random number of a row: 64 bits.
FI_EXACT uint64_t random_number(const SampleParams& p, int64_t row, uint32_t i) {
  const Random r = row_random(p, row, i / 2);
  return i % 2 ? uint64_t{r.x[3]} << 32 | r.x[2] : random_of(r);
}

// A temperature of zero takes the first of the largest.
FI_EXACT bool is_greedy(const SampleParams& p, float temperature) {
  return p.logits && p.output == kDrawToken && temperature == 0.0f;
}

// Elements at or above it pass min-p: m times the largest probability.
FI_EXACT float min_p_bound(const Scale& s, float m, bool logits) {
  if (!(m > 0.0f)) return s.lowest;
  if (!logits) {
    float bound = times(s.top, m);
    if (fused(s.top, m, -bound) > 0.0f) bound = of_bits(bits_of(bound) + 1);  // rounded down: up instead
    return bound > s.lowest ? bound : s.lowest;
  }
  if (s.factor == 0.0f) return s.lowest;
  const float bound = plus(s.top, log2_of(m < 0x1p-100f ? 0x1p-100f : m) / s.factor);
  return bound > s.lowest ? bound : s.lowest;
}

// Repetition penalty (Keskar et al. 2019, arXiv:1909.05858), then frequency and presence penalties.
FI_EXACT float penalised(float x, float repetition, float frequency, float presence, int32_t count) {
  x = x > 0.0f ? x / repetition : times(x, repetition);
  if (count > 0) x = plus(x, -plus(times(frequency, static_cast<float>(count)), presence));
  return x;
}

}  // namespace sampling
}  // namespace fi
