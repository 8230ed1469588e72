// The transform of a tile of scores Q K^T before the softmax beyond a scale: soft cap, ALiBi, masks, a user's variant.
#pragma once
#include "fi/attention/mma_tile_loader.cuh"
#include "fi/attention/variant.h"
#include "fi/cuda/math.cuh"

namespace fi {

// A thread holds scores in the accumulator layout of mma_m16n8k16: rows tile_row(x, 0) and tile_row(x, 1) of the tile,
// x < kMTiles, and two neighbouring keys in each eight.
template <class Shared, class Shape>
struct MmaScoreTransform {
  static constexpr int kMTiles = Shape::kMTiles, kN8Tiles = Shape::kKeys / 8;
  using Scores = float[kMTiles][kN8Tiles][4];

  const AttentionProblem& p;
  const Shared& shared;
  const QueryTile& tile;
  int warp, lane;

  FI_DEVICE int tile_row(int x, int half) const { return (warp * kMTiles + x) * 16 + half * 8 + lane / 4; }

  // Turns products into scores in base 2: scale, soft cap, ALiBi.
  FI_DEVICE void scale(int key, Scores& s) const {
    const float cap = p.scores.cap();
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HeadScores& head = shared.scores[tile_row(x, half)];
        const float softmax_scale = head.scale, slope = head.slope;
        const int distance = key + lane % 4 * 2 - shared.row[tile_row(x, half)].i;
#pragma unroll
        for (int n = 0; n < kN8Tiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& y = s[x][n][half * 2 + c];
            y *= softmax_scale;
            if (cap > 0.f) y = cap * CudaMath::tanh(y);
            y += slope * static_cast<float>(distance + n * 8 + c);
          }
      }
  }

  // Computes the scores of a variant, for the keys that each row sees.
  FI_DEVICE void apply_variant(int key, int end, Scores& s, Variant& variant) const {
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Row row = shared.row[tile_row(x, half)];
        const int from = p.mask.first_key(row.i),
                  to = tile_row(x, half) < tile.rows ? min(end, p.mask.end_key(row.i)) : 0;
#pragma unroll
        for (int n = 0; n < kN8Tiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int j = key + n * 8 + lane % 4 * 2 + c;
            float& y = s[x][n][half * 2 + c];
            y = j >= from && j < to ? variant.score(y, row, tile.kv_head, j) : Variant::kHidden;
          }
      }
  }

  // Masks keys by the custom, draft and items masks.
  FI_DEVICE void apply_custom_mask(int key, Scores& s) const {
    const bool bits = p.mask.custom && p.mask.custom_packed && !p.mask.draft && !p.mask.items;
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = shared.row[tile_row(x, half)].i, first = key + lane % 4 * 2;
        const unsigned visible = bits ? visible_bits(i, first) : visible_keys(i, first);
#pragma unroll
        for (int e = 0; e < 2 * kN8Tiles; ++e)
          if (!(visible >> e & 1)) s[x][e / 2][half * 2 + e % 2] = Variant::kHidden;
      }
  }
  // Masks keys by the causal mask and the sliding window.
  FI_DEVICE void apply_range_mask(int key, Scores& s) const {
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = shared.row[tile_row(x, half)].i, column = key + lane % 4 * 2;
        const int from = p.mask.first_key(i) - column, to = p.mask.end_key(i) - column;
#pragma unroll
        for (int n = 0; n < kN8Tiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (n * 8 + c < from || n * 8 + c >= to) s[x][n][half * 2 + c] = kMinusInf;
      }
  }

 private:
  // Bits of the keys that row i sees: two neighbours in each eight keys from `first` on.
  FI_DEVICE unsigned visible_keys(int i, int first) const {
    unsigned visible = 0;
#pragma unroll 1
    for (int e = 0; e < 2 * kN8Tiles; ++e) {
      const int j = first + e / 2 * 8 + e % 2;
      if (j < p.mask.kv_len && p.mask.keeps(i, j)) visible |= 1u << e;
    }
    return visible;
  }
  // The same for a packed custom mask alone: two bits of consecutive bytes each, which may span two bytes.
  FI_DEVICE unsigned visible_bits(int i, int first) const {
    const int64_t row = i * p.mask.custom_row, bit = row + first, last = (row + p.mask.kv_len - 1) >> 3;
    const auto read = [&](int64_t at) { return at <= last ? static_cast<unsigned>(p.mask.custom[at]) : 0u; };
    unsigned visible = 0, here = read(bit >> 3);
#pragma unroll 1
    for (int n = 0; n < kN8Tiles; ++n) {
      const unsigned next = read((bit >> 3) + n + 1);
      visible |= ((next << 8 | here) >> (bit & 7) & 3) << 2 * n;
      here = next;
    }
    return visible;
  }
};

}  // namespace fi
