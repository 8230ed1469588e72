// The transform of a tile of scores Q K^T before the softmax, where it is more than a scale: soft cap, ALiBi, masks, a
// user's variant.
#pragma once
#include "fi/attention/mma_tile_loader.cuh"
#include "fi/attention/variant.h"
#include "fi/cuda/math.cuh"

namespace fi {

// The scores that a thread has are those of rows place(x, 0) and place(x, 1) of the tile, x < kM, and of two
// neighbouring keys in each eight, as mma_m16n8k16 leaves them.
template <class Shared, class Shape>
struct MmaScoreTransform {
  static constexpr int kM = Shape::kM, kEights = Shape::kKeys / 8;
  using Scores = float[kM][kEights][4];

  const AttentionProblem& p;
  const Shared& shared;
  const QueryTile& tile;
  int warp, lane;

  FI_DEVICE int place(int x, int half) const { return (warp * kM + x) * 16 + half * 8 + lane / 4; }

  // Products become scores in base 2: scale, soft cap, ALiBi.
  FI_DEVICE void finish(int key, Scores& s) const {
    const float cap = p.scores.cap();
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HeadScores& head = shared.scores[place(x, half)];
        const float scale = head.scale, slope = head.slope;
        const int distance = key + lane % 4 * 2 - shared.row[place(x, half)].i;
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& y = s[x][n][half * 2 + c];
            y *= scale;
            if (cap > 0.f) y = cap * CudaMath::tanh(y);
            y += slope * static_cast<float>(distance + n * 8 + c);
          }
      }
  }

  // Products become the scores of a variant, for the keys that each row sees.
  FI_DEVICE void transform(int key, int end, Scores& s, Variant& variant) const {
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Row row = shared.row[place(x, half)];
        const int from = p.mask.first_key(row.i), to = place(x, half) < tile.rows ? min(end, p.mask.end_key(row.i)) : 0;
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int j = key + n * 8 + lane % 4 * 2 + c;
            float& y = s[x][n][half * 2 + c];
            y = j >= from && j < to ? variant.score(y, row, tile.kv_head, j) : Variant::kHidden;
          }
      }
  }

  // Keys that a custom mask or an items mask hides.
  FI_DEVICE void select(int key, Scores& s) const {
    const bool bits = p.mask.custom && p.mask.custom_packed && !p.mask.draft && !p.mask.items;
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = shared.row[place(x, half)].i, first = key + lane % 4 * 2;
        const unsigned kept = bits ? kept_bits(i, first) : kept_keys(i, first);
#pragma unroll
        for (int e = 0; e < 2 * kEights; ++e)
          if (!(kept >> e & 1)) s[x][e / 2][half * 2 + e % 2] = Variant::kHidden;
      }
  }
  // Keys outside of what causal and window leave to each of this lane's rows.
  FI_DEVICE void hide(int key, Scores& s) const {
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = shared.row[place(x, half)].i, column = key + lane % 4 * 2;
        const int from = p.mask.first_key(i) - column, to = p.mask.end_key(i) - column;
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (n * 8 + c < from || n * 8 + c >= to) s[x][n][half * 2 + c] = kMinusInf;
      }
  }

 private:
  // Which of two keys of each eight from `first` on row i sees.
  FI_DEVICE unsigned kept_keys(int i, int first) const {
    unsigned kept = 0;
#pragma unroll 1
    for (int e = 0; e < 2 * kEights; ++e) {
      const int j = first + e / 2 * 8 + e % 2;
      if (j < p.mask.kv_len && p.mask.keeps(i, j)) kept |= 1u << e;
    }
    return kept;
  }
  // The same of a packed custom mask alone: two bits of bytes that follow each other, or of two bytes.
  FI_DEVICE unsigned kept_bits(int i, int first) const {
    const int64_t row = i * p.mask.custom_row, bit = row + first, last = (row + p.mask.kv_len - 1) >> 3;
    const auto read = [&](int64_t at) { return at <= last ? static_cast<unsigned>(p.mask.custom[at]) : 0u; };
    unsigned kept = 0, here = read(bit >> 3);
#pragma unroll 1
    for (int n = 0; n < kEights; ++n) {
      const unsigned next = read((bit >> 3) + n + 1);
      kept |= ((next << 8 | here) >> (bit & 7) & 3) << 2 * n;
      here = next;
    }
    return kept;
  }
};

}  // namespace fi
