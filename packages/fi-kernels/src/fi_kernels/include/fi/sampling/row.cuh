// Where the elements of a row lie while it is worked on: in shared memory of its blocks, or in global memory.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/sampling/sample.h"

namespace fi::sampling {

// Rows are cut into slots: slot 0 is the last 16-byte boundary at or before the row, so vectors of slots are aligned
// whatever the row's address is. Slots outside of the row hold NaN, which no comparison takes in.
template <class T>
struct Slots {
  static constexpr int kVec = 16 / sizeof(T);
  const T* base;    // of slot 0
  int first, last;  // slots [first, last) are the row

  FI_DEVICE Slots(const T* row, int vocab) {
    const auto address = reinterpret_cast<uint64_t>(row);
    first = static_cast<int>(address % 16 / sizeof(T));
    base = row - first;
    last = first + vocab;
  }
  FI_DEVICE bool inside(int slot) const { return slot >= first && slot + kVec <= last; }
};

template <class T>
FI_DEVICE T not_a_number() {
  return from_float<T>(__int_as_float(0x7fffffff));
}

// Whole pieces for each of the warps of a block.
FI_DEVICE int warp_share(int slots, int warps) {
  const int each = (slots + warps - 1) / warps;
  return (each + kPiece - 1) / kPiece * kPiece;
}

// The pieces of a warp: those before and after a gap in shared memory, those in the gap in global memory (mostly L2).
// Pieces that are not wholly in the row are never in the gap.
template <class T>
struct PlacedRow {
  static constexpr int kVec = Slots<T>::kVec;
  T* shared;  // of slot 0, if there were no gap
  int gap_begin, gap_end;
  Slots<T> slots;

  FI_DEVICE int pieces_in_gap() const { return (gap_end - gap_begin) / kPiece; }
  FI_DEVICE int first_in_gap(int begin) const { return (gap_begin - begin) / kPiece; }
  FI_DEVICE void await() const {}  // until what is held is there

  FI_DEVICE T* held(int slot) const { return shared + (slot < gap_begin ? slot : slot - (gap_end - gap_begin)); }
  FI_DEVICE bool holds(int slot) const { return slot < gap_begin || slot >= gap_end; }
  FI_DEVICE const T* place(int slot) const { return holds(slot) ? held(slot) : slots.base + slot; }
  // Of a place in a piece, so many slots further on.
  FI_DEVICE static Vec<T, kVec> load(const T* place, int further) { return fi::load<T, kVec>(place + further); }
  FI_DEVICE static float at(const T* place, int further) { return to_float(place[further]); }

  // Whether what is held takes the place of elements; of 16 bits it would not be exact.
  FI_DEVICE bool keeps(int slot) const { return sizeof(T) == 4 && holds(slot); }
  FI_DEVICE void keep(int slot, const float (&y)[kVec]) const {
    Vec<T, kVec> x;
    from_float(y, x);
    *reinterpret_cast<Vec<T, kVec>*>(held(slot)) = x;
  }

  // Copies held slots by hand, by the warp, NaN where the row is not.
  FI_DEVICE void fill(int low, int high) const {
#pragma unroll 1
    for (int slot = low + static_cast<int>(threadIdx.x) % 32; slot < high; slot += 32)
      *held(slot) = slot >= slots.first && slot < slots.last ? slots.base[slot] : not_a_number<T>();
  }
};

}  // namespace fi::sampling
