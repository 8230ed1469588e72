// Describes the slice of a row that one CTA of top_k works on, and helpers for single elements.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"

namespace fi {

// A slice consists of 16-byte vectors that are aligned in global memory. Element e of the slice is x = origin + e of
// the segment. Elements outside [begin, end) are in no segment and are never read.
template <class T>
struct Slice {
  static constexpr int kVec = 16 / sizeof(T);
  using Vector = Vec<T, kVec>;

  const T* data;   // element 0
  Vector* shared;  // the first `cached` vectors
  int vectors, cached, begin, end, origin;

  // Sets the slice of CTA `rank` of `ctas` for the segment of `length` elements at `first`; slices are multiples of 32
  // vectors. At most `capacity` vectors are cached in shared memory.
  FI_DEVICE void assign(const T* first, int length, unsigned rank, unsigned ctas, int capacity) {
    const int skew = static_cast<int>(reinterpret_cast<uint64_t>(first) % 16 / sizeof(T));
    const int all = (skew + length + kVec - 1) / kVec, each = ((all + ctas - 1) / ctas + 31) / 32 * 32;
    const int before = min(static_cast<int>(rank) * each, all);
    vectors = min(each, all - before);
    cached = min(capacity, vectors);
    origin = before * kVec - skew;
    data = first + origin;
    begin = max(-origin, 0);
    end = min(vectors * kVec, length - origin);
  }

  FI_DEVICE int words() const { return (vectors + 31) / 32; }
  FI_DEVICE bool valid(int e) const { return begin <= e && e < end; }
  // A whole vector lies entirely in the segment: all but perhaps the first and the last.
  FI_DEVICE int whole_begin() const { return begin > 0 ? 1 : 0; }
  FI_DEVICE int whole_end() const { return max(end / kVec, whole_begin()); }
  FI_DEVICE bool whole(int v) const { return whole_begin() <= v && v < whole_end(); }
  FI_DEVICE Vector read_whole(int v) const { return load<T, kVec>(data + static_cast<int64_t>(v) * kVec); }
  FI_DEVICE Vector read(int v) const {
    if (whole(v)) return read_whole(v);
    Vector x{};
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (valid(v * kVec + j)) x.v[j] = data[static_cast<int64_t>(v) * kVec + j];
    return x;
  }
  FI_DEVICE Vector at(int v) const { return v < cached ? shared[v] : read(v); }
  FI_DEVICE T element(int e) const { return e < cached * kVec ? reinterpret_cast<const T*>(shared)[e] : data[e]; }
};

// The NaN-propagating maxima of two pairs of elements (PTX ISA 9.7.4.9).
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

// The largest element of a vector; NaN if it contains one.
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

// Packs an element's bits and its index x into a candidate that CTAs exchange.
template <class T>
FI_DEVICE uint64_t pack_candidate(T value, int x) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(x);
}
template <class T>
FI_DEVICE T candidate_value(uint64_t entry) {
  const uint32_t bits = static_cast<uint32_t>(entry >> 32);
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Counts elements above the k-th largest in the low half, and those equal to it in the high half.
FI_DEVICE uint64_t count_of(uint32_t key, uint32_t bound) {
  return key > bound ? 1 : key == bound ? uint64_t{1} << 32 : 0;
}

// Which elements equal to the k-th largest are selected: those with ordinals `first` to `first + equal - 1`.
struct Ties {
  uint32_t first, equal;

  Ties() = default;
  FI_DEVICE Ties(uint64_t all, uint32_t equal, bool last)
      : first(last ? static_cast<uint32_t>(all >> 32) - equal : 0), equal(equal) {}
  // Returns the number of an element among the results, or -1 if it is not selected. `before`: counts of the elements
  // before it.
  FI_DEVICE int result(uint64_t before, uint32_t key, uint32_t bound) const {
    const uint32_t above = static_cast<uint32_t>(before), seen = static_cast<uint32_t>(before >> 32);
    const bool selected = key > bound || (key == bound && seen >= first && seen - first < equal);
    return selected ? static_cast<int>(above + (seen > first ? min(seen - first, equal) : 0)) : -1;
  }
};

}  // namespace fi
