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

// The slots [begin, end) of a warp, read from global memory each time.
template <class T>
struct GlobalRow {
  static constexpr int kVec = Slots<T>::kVec;
  Slots<T> slots;

  FI_DEVICE Vec<T, kVec> load(int slot) const {
    if (slots.inside(slot)) return fi::load<T, kVec>(slots.base + slot);
    Vec<T, kVec> x;
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      x.v[i] = slot + i >= slots.first && slot + i < slots.last ? slots.base[slot + i] : not_a_number<T>();
    return x;
  }
  FI_DEVICE float at(int slot) const {
    return to_float(slot >= slots.first && slot < slots.last ? slots.base[slot] : not_a_number<T>());
  }
};

}  // namespace fi::sampling
