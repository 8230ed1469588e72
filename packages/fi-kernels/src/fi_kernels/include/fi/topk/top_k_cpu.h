// Selects the k largest elements of a row segment on the CPU: a lower bound from maxima, then a selection among the
// candidates above it.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "fi/cpu/row_convert.h"
#include "fi/topk/top_k.h"

namespace fi::cpu {
namespace detail {

// Computes the keys of radix_select.cuh: integers in the order of the elements, NaN largest, -0 equal to +0.
FI_CLONES inline void keys_of(const float* x, uint32_t* keys, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_bits(x[i]), magnitude = bits & 0x7fffffffu;
    const uint32_t number = select(magnitude == 0, 0u, bits);
    const uint32_t key = number ^ (0x80000000u | (0u - (number >> 31)));
    keys[i] = select(magnitude > 0x7f800000u, 0xffffffffu, key);
  }
}

// Computes maxima[j] = the largest of keys j, j + m, j + 2 m, ...
FI_CLONES inline void fold_maxima(const uint32_t* keys, int64_t n, uint32_t* maxima, int64_t m) {
  std::fill_n(maxima, m, 0u);
  for (int64_t from = 0; from < n; from += m) {
    const int64_t width = std::min(m, n - from);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) maxima[j] = std::max(maxima[j], keys[from + j]);
  }
}

// Finds the indices of the keys that are at least `bound`, in order. Returns their number. `found` has room for n + 16
// indices.
FI_CLONES inline int64_t indices_from(const uint32_t* keys, int64_t n, uint32_t bound, int32_t* found) {
  int64_t count = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    uint32_t any = 0;
    for (int j = 0; j < 16; ++j) any |= uint32_t{keys[i + j] >= bound};
    if (!any) continue;
    for (int j = 0; j < 16; ++j) {
      found[count] = static_cast<int32_t>(i + j);
      count += keys[i + j] >= bound;
    }
  }
  for (; i < n; ++i) {
    found[count] = static_cast<int32_t>(i);
    count += keys[i] >= bound;
  }
  return count;
}

}  // namespace detail

// Selects from rows of up to `width` elements. Each thread owns one, which holds its buffers.
class TopKSelector {
 public:
  explicit TopKSelector(int64_t width)
      : values_(new float[width]),
        keys_(new uint32_t[width]),
        scratch_(new uint32_t[width]),
        found_(new int32_t[width + 16]) {}

  // Returns the indices of the k largest of the n elements at x, in order, or sorted by value; 0 < k < n unless sorted.
  const std::vector<int32_t>& select(const void* x, int64_t n, int64_t k, const TopKParams& p, LoadRow load) {
    load(x, values_.get(), n);
    detail::keys_of(values_.get(), keys_.get(), n);
    uint32_t key = 0;
    int64_t equal = 0, count = n;
    if (k < n) {
      // A lower bound: the k-th largest of m maxima over disjoint parts of the row is at most the k-th largest of the
      // row.
      int64_t m = 64;
      while (m < 4 * k) m *= 2;
      if (m <= n / 4) {
        detail::fold_maxima(keys_.get(), n, scratch_.get(), m);
        count = detail::indices_from(keys_.get(), n, largest(m, k), found_.get());
        for (int64_t i = 0; i < count; ++i) scratch_[i] = keys_[found_[i]];
        key = largest(count, k);
      } else {
        std::copy_n(keys_.get(), n, scratch_.get());
        key = largest(n, k);
        count = detail::indices_from(keys_.get(), n, key, found_.get());
      }
      equal = k;
      for (int64_t i = 0; i < count; ++i) equal -= keys_[found_[i]] > key;
    } else {
      for (int64_t i = 0; i < n; ++i) found_[i] = static_cast<int32_t>(i);
      equal = n;
    }
    int64_t ties = 0;  // elements equal to the k-th largest, of which the first or the last `equal` are selected
    for (int64_t i = 0; i < count; ++i) ties += keys_[found_[i]] == key;
    const int64_t first = p.prefer_last ? ties - equal : 0;
    selected_.clear();
    ties = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t other = keys_[found_[i]];
      if (other > key || (other == key && ties >= first && ties < first + equal)) selected_.push_back(found_[i]);
      ties += other == key;
    }
    if (p.sorted) sort();
    return selected_;
  }

 private:
  uint32_t largest(int64_t n, int64_t k) {  // the k-th largest of the first n elements of scratch
    std::nth_element(scratch_.get(), scratch_.get() + (k - 1), scratch_.get() + n, std::greater<>());
    return scratch_[k - 1];
  }
  void sort() {
    items_.clear();
    for (int32_t index : selected_) items_.push_back(uint64_t{~keys_[index]} << 32 | static_cast<uint32_t>(index));
    std::sort(items_.begin(), items_.end());
    for (size_t i = 0; i < items_.size(); ++i) selected_[i] = static_cast<int32_t>(items_[i]);
  }

  std::unique_ptr<float[]> values_;  // arrays are not cleared: that would take as long as a small k
  std::unique_ptr<uint32_t[]> keys_, scratch_;
  std::unique_ptr<int32_t[]> found_;
  std::vector<int32_t> selected_;
  std::vector<uint64_t> items_;
};

}  // namespace fi::cpu
