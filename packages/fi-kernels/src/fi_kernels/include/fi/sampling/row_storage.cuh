// Describes where the elements of a row reside while it is processed: in shared memory of its CTAs, or in global
// memory.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/sampling/sample.h"

namespace fi::sampling {

// Addresses a row by slots. Slot 0 is the last 16-byte boundary at or before the row, so vectors of slots are aligned
// for any row address. Slots outside the row read as NaN, which passes no comparison.
template <class T>
struct AlignedRow {
  static constexpr int kVec = 16 / sizeof(T);
  const T* base;    // the address of slot 0
  int first, last;  // the row is slots [first, last)

  FI_DEVICE AlignedRow(const T* row, int vocab) {
    const auto address = reinterpret_cast<uint64_t>(row);
    first = static_cast<int>(address % 16 / sizeof(T));
    base = row - first;
    last = first + vocab;
  }
  FI_DEVICE bool inside(int slot) const { return slot >= first && slot + kVec <= last; }
};

template <class T>
FI_DEVICE T nan_value() {
  return from_float<T>(__int_as_float(0x7fffffff));
}

// Slots per warp, a multiple of the tile size.
FI_DEVICE int slots_per_warp(int slots, int warps) {
  const int per_warp = (slots + warps - 1) / warps;
  return (per_warp + kTileSize - 1) / kTileSize * kTileSize;
}

// The tiles of one warp. Tiles before and after a gap are cached in shared memory; tiles in the gap are read from
// global memory, mostly from L2. The gap contains no tile that is partly outside the row.
template <class T>
struct CachedRow {
  static constexpr int kVec = AlignedRow<T>::kVec;
  T* shared;  // the address of slot 0, as if there were no gap
  int gap_begin, gap_end;
  AlignedRow<T> slots;

  FI_DEVICE int tiles_in_gap() const { return (gap_end - gap_begin) / kTileSize; }
  FI_DEVICE int first_tile_in_gap(int begin) const { return (gap_begin - begin) / kTileSize; }
  FI_DEVICE void await() const {}  // waits for asynchronous copies; none here

  FI_DEVICE T* cached(int slot) const { return shared + (slot < gap_begin ? slot : slot - (gap_end - gap_begin)); }
  FI_DEVICE bool is_cached(int slot) const { return slot < gap_begin || slot >= gap_end; }
  FI_DEVICE const T* address(int slot) const { return is_cached(slot) ? cached(slot) : slots.base + slot; }
  // Loads the vector `offset` slots after an address.
  FI_DEVICE static Vec<T, kVec> load(const T* address, int offset) { return fi::load<T, kVec>(address + offset); }
  FI_DEVICE static float at(const T* address, int offset) { return to_float(address[offset]); }

  // Whether ratios may overwrite the cached elements; 16-bit elements cannot hold them exactly.
  FI_DEVICE bool caches_ratios(int slot) const { return sizeof(T) == 4 && is_cached(slot); }
  FI_DEVICE void store_ratios(int slot, const float (&y)[kVec]) const {
    Vec<T, kVec> x;
    from_float(y, x);
    *reinterpret_cast<Vec<T, kVec>*>(cached(slot)) = x;
  }

  // Copies the slots [low, high) to the cache with ordinary loads, by one warp; writes NaN outside the row.
  FI_DEVICE void fill(int low, int high) const {
#pragma unroll 1
    for (int slot = low + static_cast<int>(threadIdx.x) % 32; slot < high; slot += 32)
      *cached(slot) = slot >= slots.first && slot < slots.last ? slots.base[slot] : nan_value<T>();
  }
};

}  // namespace fi::sampling
