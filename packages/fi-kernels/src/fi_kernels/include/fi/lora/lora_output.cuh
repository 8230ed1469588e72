// What the products of a tile are added to, or written over: rows of its pairs, in vectors of 8 columns of a slice.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/lora/lora_window.cuh"

namespace fi {

constexpr int kLoraVector = 8, kLoraColumns = 4 * kLoraVector;  // columns of a lane; of a warp

// Where a lane's values lie in the fragments of a warp.
struct LoraLane {
  int warp = static_cast<int>(threadIdx.x) / 32, row = static_cast<int>(threadIdx.x) % 32 / 4,
      column = static_cast<int>(threadIdx.x) % 4;
};

// A lane has the 8 columns from 8 `column` on of pairs `row`, `row` + 8 and so on.
template <class Out, int kTiles>
struct LoraOutput {
  using Window = LoraWindow<8 * kTiles>;
  static constexpr int kWords = kLoraVector * sizeof(Out) / 4;
  struct Vector {
    unsigned words[kWords];
  };

  const LoraDeltaParams& p;
  Out* rows[kTiles];  // null: no pair

  FI_DEVICE LoraOutput(const LoraDeltaParams& p, const Window& window, int first, const LoraLane& lane,
                       const typename Window::Tile& tile, int slice)
      : p(p) {
    Out* out = static_cast<Out*>(p.out) + p.begin_of(slice) + lane.column * kLoraVector;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int pair = n * 8 + lane.row;
      rows[n] = pair < tile.count ? out + (first + window.members[tile.first + pair]) * p.out_row_stride : nullptr;
    }
  }

  // What stands in column `at` of the lane's rows and behind it. exists: of these columns.
  FI_DEVICE void load(int at, bool exists, Vector (&old)[kTiles]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (!p.add || !exists || !rows[n]) continue;
      const Out* from = rows[n] + at;
      if (p.wide) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4)
          reinterpret_cast<uint4&>(old[n].words[i]) = reinterpret_cast<const uint4*>(from)[i / 4];
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) old[n].words[i] = reinterpret_cast<const unsigned*>(from)[i];
      }
    }
  }
  // d: columns 2 i and 2 i + 1 in d[i].
  FI_DEVICE void store(int at, int n, float scale, const Vector& old, const float (&d)[4][2]) const {
    if (!rows[n]) return;
    const Out* before = reinterpret_cast<const Out*>(old.words);
    Vector vector;
    Out* sums = reinterpret_cast<Out*>(vector.words);
#pragma unroll
    for (int i = 0; i < kLoraVector; ++i) {
      const Out x = from_float<Out>(scale * d[i / 2][i % 2]);
      sums[i] = p.add ? from_float<Out>(to_float(before[i]) + to_float(x)) : x;
    }
    Out* to = rows[n] + at;
    if (p.wide) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4)
        store_global(to + i * 4 / sizeof(Out), reinterpret_cast<uint4&>(vector.words[i]));
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) reinterpret_cast<unsigned*>(to)[i] = vector.words[i];
    }
  }
};

}  // namespace fi
