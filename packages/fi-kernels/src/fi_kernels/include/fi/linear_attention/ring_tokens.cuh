// The inputs of tokens that a CTA replays into a state, in shared memory as floats, and the state in registers.
#pragma once
#include "fi/linear_attention/checkpointing_ssu.h"
#include "fi/linear_attention/state_tile.cuh"

namespace fi {

constexpr int kRingThreads = 128;

// T: of x, B and C. S: of the state. A CTA has kCtaRows rows of a state of kK columns.
template <class T, class S, int kK, int kRows>
struct RingTokens {
  using Tile = StateTile<S, kK, kRows>;
  static constexpr int kVec = 8, kCtaRows = kRingThreads / 32 * Tile::kWarpRows;
  using Words = Vec<T, kVec>;
  struct Shared {
    alignas(16) float b[2 * kRingTokens][kK], c[kRingTokens][kK];
    alignas(16) float x[2 * kRingTokens][kCtaRows];
    float dt[2 * kRingTokens], decay[2 * kRingTokens];
  };

  // Rows of kWidth elements of 16 bits: from(i) is the address of row i, or null; store(i, element, words) takes a
  // copy.
  template <int kWidth, class From, class Store>
  FI_DEVICE static void load_rows(float (*to)[kWidth], int first, int end, int width, From&& from, Store&& keep) {
    constexpr int kChunks = kWidth / kVec;
    for (int at = threadIdx.x; at < (end - first) * kChunks; at += kRingThreads) {
      const int row = first + at / kChunks, element = at % kChunks * kVec;
      if (element >= width) continue;
      const auto words = load<T, kVec>(from(row) + element);
      float values[kVec];
      to_float(words, values);
#pragma unroll
      for (int i = 0; i < kVec; i += 4)
        *reinterpret_cast<float4*>(&to[row][element + i]) =
            make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
      keep(row, element, words);
    }
  }

  FI_DEVICE static void columns_of(const float (&row)[kK], float (&f)[Tile::kColumns]) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns; i += 4) {
      const float4 words = *reinterpret_cast<const float4*>(&row[Tile::column(i)]);
      f[i] = words.x, f[i + 1] = words.y, f[i + 2] = words.z, f[i + 3] = words.w;
    }
  }

  // A token in the state; its inputs stay in `value`. row: of the CTA.
  FI_DEVICE static void replay(const Shared& shared, int token, int row, Tile& state, float (&value)[kRows]) {
    float in[Tile::kColumns], added[kRows];
    columns_of(shared.b[token], in);
#pragma unroll
    for (int r = 0; r < kRows; ++r) value[r] = shared.x[token][row + r], added[r] = shared.dt[token] * value[r];
    state.update(shared.decay[token], added, in);
  }

  // Of each row the product with a vector, in the order of Tile::multiply_alike: a lane gets the row of number kept_row().
  static constexpr int kKept = kRows < Tile::kLanes ? kRows : Tile::kLanes;
  FI_DEVICE static int kept_row() { return Tile::lane() / (Tile::kLanes / kKept); }
  FI_DEVICE static float multiply(const Tile& state, const float (&f)[Tile::kColumns]) {
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = state.multiply_row(r, f);
    int distance = Tile::kLanes / 2;
#pragma unroll
    for (int count = kRows / 2; count > 0; count /= 2, distance /= 2) {
      const bool upper = Tile::lane() & distance;
#pragma unroll
      for (int r = 0; r < count; ++r) {
        const float mine = upper ? sums[r + count] : sums[r], other = upper ? sums[r] : sums[r + count];
        sums[r] = mine + __shfl_xor_sync(0xffffffffu, other, distance);
      }
    }
    return warp_sum(sums[0], 2 * distance);
  }
};

}  // namespace fi
