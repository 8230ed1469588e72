// The part of a row that a block of top_k works on, and what it says of single elements.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {

// In vectors of 16 bytes that are aligned in global memory. Element e of the slice is x = origin + e of the segment;
// those outside of [begin, end) belong to no segment and are never read.
template <class T>
struct Slice {
  static constexpr int kVec = 16 / sizeof(T);
  using Vector = Vec<T, kVec>;

  const T* from;   // element 0
  Vector* shared;  // the first `held` vectors
  int vectors, held, begin, end, origin;

  // Part `rank` of `blocks` of the segment of `length` elements at `first`; whole groups of 32 vectors.
  FI_DEVICE void place(const T* first, int length, unsigned rank, unsigned blocks, int room) {
    const int skew = static_cast<int>(reinterpret_cast<uint64_t>(first) % 16 / sizeof(T));
    const int all = (skew + length + kVec - 1) / kVec, each = ((all + blocks - 1) / blocks + 31) / 32 * 32;
    const int before = min(static_cast<int>(rank) * each, all);
    vectors = min(each, all - before);
    held = min(room, vectors);
    origin = before * kVec - skew;
    from = first + origin;
    begin = max(-origin, 0);
    end = min(vectors * kVec, length - origin);
  }

  FI_DEVICE int words() const { return (vectors + 31) / 32; }
  FI_DEVICE bool valid(int e) const { return begin <= e && e < end; }
  // The vectors that lie in the segment altogether: all but perhaps the first and the last.
  FI_DEVICE int whole_begin() const { return begin > 0 ? 1 : 0; }
  FI_DEVICE int whole_end() const { return max(end / kVec, whole_begin()); }
  FI_DEVICE bool whole(int v) const { return whole_begin() <= v && v < whole_end(); }
  FI_DEVICE Vector read_whole(int v) const { return load<T, kVec>(from + static_cast<int64_t>(v) * kVec); }
  FI_DEVICE Vector read(int v) const {
    if (whole(v)) return read_whole(v);
    Vector x{};
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (valid(v * kVec + j)) x.v[j] = from[static_cast<int64_t>(v) * kVec + j];
    return x;
  }
  FI_DEVICE Vector at(int v) const { return v < held ? shared[v] : read(v); }
  FI_DEVICE T element(int e) const { return e < held * kVec ? reinterpret_cast<const T*>(shared)[e] : from[e]; }
};

// Of two pairs of elements (PTX ISA 9.7.4.9).
template <class T>
FI_DEVICE uint32_t max_nan_pair(uint32_t x, uint32_t y);
template <>
FI_DEVICE uint32_t max_nan_pair<__half>(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
template <>
FI_DEVICE uint32_t max_nan_pair<__nv_bfloat16>(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// The largest element of a vector, NaN if there is one.
FI_DEVICE float largest(const Vec<float, 4>& x) { return max_nan(max_nan(x.v[0], x.v[1]), max_nan(x.v[2], x.v[3])); }
template <class T>
FI_DEVICE float largest(const Vec<T, 8>& x) {
  uint32_t pairs[4];
  memcpy(pairs, &x, sizeof pairs);
  const uint32_t best = max_nan_pair<T>(max_nan_pair<T>(pairs[0], pairs[1]), max_nan_pair<T>(pairs[2], pairs[3]));
  Vec<T, 2> both;
  memcpy(&both, &best, sizeof both);
  return max_nan(to_float(both.v[0]), to_float(both.v[1]));
}

// An element for another block: its bits and its place.
template <class T>
FI_DEVICE uint64_t entry_of(T value, int x) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(x);
}
template <class T>
FI_DEVICE T value_in(uint64_t entry) {
  const uint32_t bits = static_cast<uint32_t>(entry >> 32);
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Counts of elements above the k-th largest (in the lower half) and of those equal to it.
FI_DEVICE uint64_t count_of(uint32_t key, uint32_t bound) {
  return key > bound ? 1 : key == bound ? uint64_t{1} << 32 : 0;
}

// Of the equal ones, numbers `first` to `first + equal - 1` are selected.
struct Ties {
  uint32_t first, equal;

  Ties() = default;
  FI_DEVICE Ties(uint64_t all, uint32_t equal, bool last)
      : first(last ? static_cast<uint32_t>(all >> 32) - equal : 0), equal(equal) {}
  // The place among the selected of an element, or -1; `before`: counts of those before it.
  FI_DEVICE int place(uint64_t before, uint32_t key, uint32_t bound) const {
    const uint32_t above = static_cast<uint32_t>(before), seen = static_cast<uint32_t>(before >> 32);
    const bool taken = key > bound || (key == bound && seen >= first && seen - first < equal);
    return taken ? static_cast<int>(above + (seen > first ? min(seen - first, equal) : 0)) : -1;
  }
};

}  // namespace fi
