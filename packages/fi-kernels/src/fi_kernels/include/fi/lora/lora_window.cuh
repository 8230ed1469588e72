// The pairs of a window of kLoraWindow in tiles of one adapter and one expert, found by each CTA for itself: nothing is
// sorted before.
#pragma once
#include "fi/cuda/scan.cuh"
#include "fi/lora/lora_delta.h"

namespace fi {

constexpr int kLoraWarps = 8, kLoraThreads = 32 * kLoraWarps, kLoraWindow = kLoraThreads;
constexpr int kLoraSharedExperts = 512;  // whose offsets a CTA keeps
constexpr int kLoraFewBins = 32;         // adapters times experts that are counted

// In shared memory. kRows: the most pairs of a tile.
template <int kRows>
struct LoraWindow {
  int4 keys[kLoraWindow / 4];
  int rows[kLoraWindow];        // of x
  int members[kLoraWindow];     // pairs of the window, those of a tile side by side
  int tile_keys[kLoraWindow];   // of each tile
  int tile_spans[kLoraWindow];  // its first member << 8 | how many
  int starts[kLoraWindow];      // of a key's pairs: its first tile << 16 | its first member
  int counts[kLoraWindow];      // of each warp: pairs of each of few keys
  int sums[kLoraWarps];
  int offsets[kLoraSharedExperts + 1];
  int tiles;

  struct Tile {
    int adapter, expert, first, count;  // first: of its members
  };
  FI_DEVICE Tile tile(int index) const {
    const int key = tile_keys[index], span = tile_spans[index];
    return {key >> 16, key & 0xffff, span >> 8, span & 0xff};
  }
  FI_DEVICE int key(int pair) const { return reinterpret_cast<const int*>(keys)[pair]; }

  // By all threads, one for each pair from `first` on.
  FI_DEVICE void build(const LoraDeltaParams& p, int first) {
    const int thread = static_cast<int>(threadIdx.x), pair = first + thread, experts = p.pairs.expert_count;
    const int64_t token = pair < p.pairs.count ? p.pairs.token_of(pair) : -1;
    const int32_t* ends = p.pairs.offsets;
    if (ends && experts <= kLoraSharedExperts) {
#pragma unroll 1
      for (int i = thread; i <= experts; i += kLoraThreads) offsets[i] = ends[i];
      __syncthreads();
      ends = offsets;
    }
    const int own = pair < p.pairs.count ? p.pairs.key_of(pair, token, ends) : LoraPairs::kNoPair;
    reinterpret_cast<int*>(keys)[thread] = own;
    rows[thread] = static_cast<int>(p.per_pair ? pair : token);
    __syncthreads();
    int begin = 0, end = min(kLoraWindow, p.pairs.count - first);
    if (own < 0) end = 0;
    if (own >= 0 && ends) {
      begin = max(begin, ends[own & 0xffff] - first);
      end = min(end, ends[(own & 0xffff) + 1] - first);
    }
    const Group group = int64_t{p.pairs.loras} * experts <= kLoraFewBins
                            ? count(own, (own >> 16) * experts + (own & 0xffff))
                            : search(own, begin, end);
    place(own, group);
  }

 private:
  // The pairs with a pair's key: a number that they share, how many there are, and how many come before it.
  struct Group {
    int number, total, before;
  };

  // By counts of each warp, where there are few keys.
  FI_DEVICE Group count(int own, int bin) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    const unsigned same = __match_any_sync(0xffffffffu, own), below = (1u << thread % 32) - 1;
    counts[thread] = 0;
    __syncthreads();
    if (own >= 0 && !(same & below)) counts[warp * kLoraFewBins + bin] = __popc(same);
    __syncthreads();
    Group group{own < 0 ? 0 : bin, 0, __popc(same & below)};
#pragma unroll
    for (int w = 0; w < kLoraWarps; ++w) {
      const int of_warp = counts[w * kLoraFewBins + group.number];
      group.total += of_warp;
      if (w < warp) group.before += of_warp;
    }
    return group;
  }
  // Among the pairs [begin, end), where all of them lie.
  FI_DEVICE Group search(int own, int begin, int end) const {
    const int thread = static_cast<int>(threadIdx.x);
    Group group{-1, 0, 0};
    for (int i = begin / 4; i * 4 < end; ++i) {
      const int4 four = keys[i];
      const int same = (four.x == own) | (four.y == own) << 1 | (four.z == own) << 2 | (four.w == own) << 3;
      if (same && group.number < 0) group.number = i * 4 + __ffs(same) - 1;
      group.total += __popc(same);
      group.before += __popc(same & ((1 << min(max(thread - i * 4, 0), 4)) - 1));
    }
    return group;
  }
  // Lists tiles in the order of their pairs.
  FI_DEVICE void place(int own, const Group& group) {
    const int thread = static_cast<int>(threadIdx.x);
    const bool opens = own >= 0 && group.before == 0;
    const int size = opens ? (group.total + kRows - 1) / kRows << 16 | group.total : 0;
    const int first = exclusive_sum<kLoraWarps>(size, sums);
    if (opens) starts[group.number] = first;
    if (thread == kLoraThreads - 1) tiles = (first + size) >> 16;
    __syncthreads();
    if (own >= 0) {
      const int at = starts[group.number], member = (at & 0xffff) + group.before;
      members[member] = thread;
      if (group.before % kRows == 0) {
        const int number = (at >> 16) + group.before / kRows;
        tile_keys[number] = own;
        tile_spans[number] = member << 8 | min(kRows, group.total - group.before);
      }
    }
    __syncthreads();
  }
};

// A CTA's share of a window: tasks own, own + groups, ...
struct LoraShare {
  int first, own;  // first: pair

  FI_DEVICE explicit LoraShare(int groups) {
    const int window = static_cast<int>(blockIdx.x) / groups, at = static_cast<int>(blockIdx.x) - window * groups;
    first = window * kLoraWindow;
    own = window % 2 ? groups - 1 - at : at;  // who has one task more differs from window to window
  }
};

}  // namespace fi
