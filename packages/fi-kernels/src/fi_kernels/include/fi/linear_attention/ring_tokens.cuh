// The inputs of tokens that a CTA replays into a state, in shared memory, and the state in registers.
#pragma once
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/linear_attention/checkpointing_ssu.h"
#include "fi/linear_attention/state_tile.cuh"

namespace fi {

constexpr int kRingThreads = 128;

// T: of x, B and C. S: of the state. A CTA has kCtaRows rows of a state of kK columns. Held tokens have places from 0
// on, new ones from kRingTokens on.
template <class T, class S, int kK, int kRows>
struct RingTokens {
  using Tile = StateTile<S, kK, kRows>;
  static constexpr int kVec = 8, kCtaRows = kRingThreads / 32 * Tile::kWarpRows;
  struct Shared {
    alignas(16) T b[2 * kRingTokens][kK], c[kRingTokens][kK];
    alignas(16) T x[2 * kRingTokens][kCtaRows];
    float dt[2 * kRingTokens], decay[2 * kRingTokens];
  };

  // f(row, element) for each vector of `count` rows of `width` elements, spread over the CTA.
  template <int kWidth, class F>
  FI_DEVICE static void each_vector(int count, int width, F&& f) {
    constexpr int kChunks = kWidth / kVec;
    for (int at = threadIdx.x; at < count * kChunks; at += kRingThreads)
      if (at % kChunks * kVec < width) f(at / kChunks, at % kChunks * kVec);
  }

  FI_DEVICE static void columns_of(const T (&row)[kK], float (&f)[Tile::kColumns]) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns; i += 4) {
      float part[4];
      to_float(load<T, 4>(&row[Tile::column(i)]), part);
#pragma unroll
      for (int e = 0; e < 4; ++e) f[i + e] = part[e];
    }
  }

  // A token in the state. row: of the CTA, the first of this lane.
  FI_DEVICE static void replay(const Shared& shared, int token, int row, Tile& state) {
    float in[Tile::kColumns], added[kRows];
    columns_of(shared.b[token], in);
#pragma unroll
    for (int r = 0; r < kRows; ++r) added[r] = shared.dt[token] * to_float(shared.x[token][row + r]);
    state.update(shared.decay[token], added, in);
  }

  // Of each row the product with a vector, in the order of Tile::multiply_alike: a lane gets the row of number
  // kept_row().
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
