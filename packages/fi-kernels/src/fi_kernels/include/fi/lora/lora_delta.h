// Parameters of lora_delta, shared by launcher, CPU and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/find_segment.h"
#include "fi/tables.h"
#include "fi/types.h"

namespace fi {

constexpr int64_t kMostLoraExperts = 1 << 16, kMostLoras = 1 << 15;  // a key has 16 and 15 bits of them

// Which adapter and which expert the pairs have. A pair is a row of the output.
struct LoraPairs {
  IndexTable tokens;    // [count]; none: pair j is of token j / top_k
  IndexTable experts;   // [count], or [tokens, top_k]; none: offsets, or one expert
  IndexTable adapters;  // [token_count]; negative: none
  // [experts + 1]: the pairs of each expert; pairs behind the last are none. Null: no such order.
  const int32_t* offsets;
  int64_t first_expert;
  int32_t count, token_count, expert_count, loras;
  Divisor top_k;

  static constexpr int32_t kNoAdapter = -1, kNoPair = -2;

  FI_HOST_DEVICE int64_t token_of(int32_t pair) const { return tokens.data ? tokens.at(pair) : divide(pair, top_k); }
  // adapter << 16 | expert; kNoAdapter; or kNoPair: of an expert elsewhere, or of no token. ends: offsets, or a copy.
  FI_HOST_DEVICE int32_t key_of(int32_t pair, int64_t token, const int32_t* ends) const {
    if (token < 0 || token >= token_count) return kNoPair;
    int64_t expert = 0;
    if (ends)
      expert = find_segment(ends, expert_count, pair);
    else if (experts.data)
      expert = (tokens.data ? experts.at(pair) : experts.at(token, pair - token * top_k.value)) - first_expert;
    if (expert < 0 || expert >= expert_count) return kNoPair;
    const int64_t adapter = adapters.at(token);
    if (adapter < 0 || adapter >= loras) return kNoAdapter;
    return static_cast<int32_t>(adapter << 16 | expert);
  }
  FI_HOST_DEVICE int32_t key_of(int32_t pair) const { return key_of(pair, token_of(pair), offsets); }
};

// The weights of an adapter for an expert, at first + adapter * lora_stride + expert * expert_stride, or, with a table
// of addresses, at table[expert] + adapter * lora_stride. Strides are in elements.
struct LoraWeights {
  const void* first;
  const int64_t* table;
  int64_t lora_stride, expert_stride, row_stride;
};

// Columns [begin, begin + columns) of the output.
struct LoraSlice {
  LoraWeights a;  // [rank, in]
  LoraWeights b;  // [columns, rank]
  int64_t begin;
  int32_t columns;
};

// For each pair, with its token's adapter l and its expert e, and each slice:
//   kLoraDelta:  out[pair, columns] = scale scales[l] b[l, e] (a[l, e] x)
//   kLoraShrink: out[slice, pair] += scale (a[l, e] x)
//   kLoraExpand: out[pair, columns] = scale b[l, e] middle[slice, pair]
// where x is x[token], or x[pair]. On a GPU one launch writes sums of parts of a x to middle, and one that adds them in
// order computes the rest. add: to out. fill: pairs without an adapter, and those of experts elsewhere but for
// what is behind the offsets, get -0, which changes no bit where it is added; else they are not written.
enum LoraStage : int32_t { kLoraDelta = 0, kLoraShrink = 1, kLoraExpand = 2 };

struct LoraDeltaParams {
  static constexpr int32_t kMostSlices = 3;

  LoraPairs pairs;
  LoraSlice slices[kMostSlices];
  void* out;
  const void* x;
  void* middle;           // of an expand x: [slices, pairs, rank]; else fp32 sums [parts, pairs, slices, rank]
  const int64_t* begins;  // [slices], on the device: the first column of each; null: those of the slices
  const float* scales;    // [loras]; null: ones
  int64_t x_row_stride, middle_part_stride, middle_slice_stride, middle_row_stride, out_row_stride, out_slice_stride;
  float scale;
  int32_t slice_count, rank, in, columns;  // columns: of a row of out
  int32_t per_pair, add, fill;
  int32_t wide;               // whether 8 columns of the output from a multiple of 8 on begin at a multiple of 16 bytes
  int32_t parts, part_steps;  // parts of `in`, whose sums are added in order, of so many steps of 32
  int32_t chunks, chunk_groups;       // chunks of the columns of a slice, which CTAs share, of so many groups of 32
  int32_t groups;                     // CTAs that share the pairs of a window
  Divisor of_tile, of_part, of_rank;  // tasks of a tile, parts, rank
  // What tells the pairs, and the weights, was complete before the kernel ahead in the stream began. Of an expand: it
  // follows a shrink, so that all but the sums was.
  int32_t ready;

  FI_HOST_DEVICE bool fills(int32_t key) const {
    return fill && (key == LoraPairs::kNoAdapter || (key == LoraPairs::kNoPair && !pairs.offsets));
  }
  FI_HOST_DEVICE int64_t begin_of(int32_t slice) const { return begins ? begins[slice] : slices[slice].begin; }
  FI_HOST_DEVICE float scale_of(int32_t adapter) const { return scales ? scale * scales[adapter] : scale; }
};

}  // namespace fi
