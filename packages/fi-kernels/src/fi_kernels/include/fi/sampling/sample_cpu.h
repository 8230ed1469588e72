// Samples one row on the CPU: filter thresholds, draws, renormalisation and masking.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "fi/cpu/reduce.h"
#include "fi/cpu/target.h"
#include "fi/sampling/tile.h"

namespace fi::sampling {
namespace detail {

FI_CLONES inline float largest(const float* x, int64_t n) {
  return cpu::maximum(n, [=](int64_t i) __attribute__((always_inline)) { return x[i]; });
}
template <bool kLogits>
FI_INLINE Weight weight_of(float x, const Scale& s) {
  return kLogits ? logit_weight(x, s) : prob_weight(x, s);
}
template <bool kLogits>
FI_CLONES inline void weigh(const float* x, uint32_t* w, int64_t n, Scale s) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = cpu::select(x[i] >= s.lowest, coarse_weight(weight_of<kLogits>(x[i], s)), 0u);
}
// Computes the weights of a tile relative to the tile's own maximum.
template <bool kLogits>
FI_CLONES inline void weigh_tile(const float* x, uint32_t* w, int64_t n, Scale s) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = cpu::select(x[i] >= s.lowest, tile_weight(weight_of<kLogits>(x[i], s)), 0u);
}
FI_CLONES inline uint64_t sum_weights_from(const float* x, const uint32_t* w, int64_t n, float lowest) {
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += cpu::select(x[i] >= lowest, w[i], 0u);
  return sum;
}
// The sum of up to kPartSize fine weights. Three sums of 32 bits take half the instructions of one of 64.
constexpr int64_t kPartSize = 65536;
struct WeightSum {
  uint32_t high, middle, low;  // in units of 2^24, 2^8 and 1
  uint64_t total() const { return (uint64_t{high} << 24) + (uint64_t{middle} << 8) + low; }
};
// Writes `y[i]` = probability of x[i] over that of the row's maximum; 0 below `lowest`, and NaN for NaN. Returns the
// sum of their fine weights. n is at most kPartSize.
template <bool kLogits>
FI_CLONES inline WeightSum part_ratios(const float* x, float* y, int64_t n, Scale s, float lowest) {
  uint32_t high = 0, middle = 0, low = 0;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {  // without omp simd, which fixes the number of lanes before the clones exist
    const float value = x[i];
    const Weight w = weight_of<kLogits>(value, s);
    const uint32_t keep = 0u - uint32_t(value >= lowest);
    y[i] = cpu::select(value >= lowest, kLogits ? logit_ratio(value, s) : prob_ratio(value, s),
                       cpu::select(value == value, 0.0f, value));
    const uint32_t coarse = coarse_weight(w) & keep;
    high += coarse >> 16;
    middle += coarse & 0xffffu;
    low += shift_right(w.mantissa, w.shift - 8) & 0xffu & keep;  // 0 for shifts below 8: the mantissa ends in 8 zeros
  }
  return {high, middle, low};
}
template <bool kLogits>
uint64_t ratios(const float* x, float* y, int64_t n, const Scale& s, float lowest) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; i += kPartSize)
    total += part_ratios<kLogits>(x + i, y + i, std::min(kPartSize, n - i), s, lowest).total();
  return total;
}
FI_CLONES inline void normalise(float* y, int64_t n, float inverse) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float value = y[i] * inverse;
    y[i] = cpu::select(value > 1.0f, 1.0f, value);
  }
}
FI_CLONES inline void mask(const float* x, float* y, int64_t n, float lowest) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = cpu::select(x[i] >= lowest, x[i], cpu::select(x[i] != x[i], x[i], -HUGE_VALF));
}
FI_CLONES inline void group_maxima(const float* x, float* maximum, int64_t groups, int64_t group_size) {
  for (int64_t g = 0; g < groups; ++g) {
    float best = -HUGE_VALF;
#pragma omp simd reduction(max : best)
    for (int64_t i = 0; i < group_size; ++i) {
      const float value = x[g * group_size + i];
      best = value > best ? value : best;
    }
    maximum[g] = best;
  }
}

}  // namespace detail

struct CpuRowSampler {
  int64_t n;
  bool logits;
  const float* x;  // the elements: `buffer`, or the row itself
  float maximum = 0.0f;
  Scale scale{};
  std::vector<float> buffer, results;
  std::vector<uint32_t> w;  // weights of the elements from `scale.lowest` on
  std::vector<uint32_t> tile_weights;
  std::vector<std::pair<float, uint32_t>> bucket_elements;
  std::vector<float> candidates;
  std::vector<TileSum> tile_sums;

  CpuRowSampler(int64_t n, bool logits) : n(n), logits(logits), x(nullptr) {}

  // Points `x` at a buffer of this object, for a row that is converted or adjusted. Returns the buffer.
  float* use_buffer() {
    buffer.resize(static_cast<size_t>(n));
    x = buffer.data();
    return buffer.data();
  }
  // Computes the row maximum and the scale. Returns false if no element has probability.
  bool prepare(float temperature) {
    maximum = detail::largest(x, n);
    if (!(maximum >= min_value())) return false;
    scale = logits ? logits_scale(maximum, temperature) : probs_scale(maximum);
    return true;
  }
  void weigh() {
    w.resize(static_cast<size_t>(n));
    (logits ? detail::weigh<true> : detail::weigh<false>)(x, w.data(), n, scale);
  }

  // Returns the k-th largest element, or `lowest` if fewer elements exist. The k-th largest maximum over groups of 64
  // or 16 elements is a lower bound, so only the candidates above it are partially sorted.
  float top_k_threshold(int64_t k, float lowest) {
    const int64_t group_size = k <= n / 128 ? 64 : 16;
    const int64_t groups = n / group_size;
    float bound = lowest;
    if (k <= groups / 2) {
      candidates.resize(static_cast<size_t>(groups));
      detail::group_maxima(x, candidates.data(), groups, group_size);
      std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), std::greater<float>());
      bound = std::max(bound, candidates[static_cast<size_t>(k - 1)]);
    }
    candidates.clear();
    for (int64_t i = 0; i < n; ++i)
      if (x[i] >= bound) candidates.push_back(x[i]);
    if (static_cast<int64_t>(candidates.size()) < k) return lowest;
    std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), std::greater<float>());
    return candidates[static_cast<size_t>(k - 1)];
  }

  // Returns the top-p threshold: the smallest element of the smallest set of largest elements whose weight reaches the
  // share p of the total. A histogram over the ordered bits finds the bucket, a sort finds the element in it.
  float top_p_threshold(float p, float lowest) {
    constexpr int shift = 20;  // a bucket spans an eighth of a power of two
    std::vector<uint64_t> sums(size_t{1} << (32 - shift));
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i)
      if (x[i] >= lowest) {
        sums[bucket(x[i]) >> shift] += weight(i);
        total += weight(i);
      }
    const uint64_t target = top_p_target(total, p);
    uint64_t above = 0;
    size_t crossing = sums.size();
    while (crossing > 0 && above + sums[crossing - 1] < target) above += sums[--crossing];
    if (crossing == 0) return lowest;
    --crossing;
    bucket_elements.clear();
    for (int64_t i = 0; i < n; ++i)
      if (x[i] >= lowest && bucket(x[i]) >> shift == crossing) bucket_elements.emplace_back(x[i], weight(i));
    std::sort(bucket_elements.begin(), bucket_elements.end(),
              [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [value, part] : bucket_elements) {
      above += part;
      if (above >= target) return value;
    }
    return lowest;
  }

  float threshold(int64_t k, float top_p, float min_p, bool joint) {
    float lowest = scale.lowest;
    if (k > 0 && k < n) lowest = top_k_threshold(k, lowest);
    if (!(top_p >= 1.0f)) lowest = std::max(lowest, top_p_threshold(top_p, joint ? scale.lowest : lowest));
    return std::max(lowest, min_p_bound(scale, min_p, logits));
  }

  // Inverts the CDF: returns the first index at which the running sum of the weights from `lowest` on exceeds `target`,
  // which is less than their total.
  int64_t locate(float lowest, uint64_t target) const {
    constexpr int64_t chunk = 4096;
    uint64_t passed = 0;
    for (int64_t i = 0; i < n; i += chunk) {
      const int64_t size = std::min(chunk, n - i);
      const uint64_t part = detail::sum_weights_from(x + i, w.data() + i, size, lowest);
      if (passed + part > target)
        for (int64_t j = i;; ++j) {
          if (x[j] >= lowest) passed += weight(j);
          if (passed > target) return j;
        }
      passed += part;
    }
    return n - 1;
  }
  uint64_t total(float lowest) const { return detail::sum_weights_from(x, w.data(), n, lowest); }

  // Computes the weight sum of each tile, for draws from the whole row.
  void sum_tiles() {
    const int64_t tiles = (n + kTileSize - 1) / kTileSize;
    tile_sums.resize(static_cast<size_t>(tiles));
    tile_weights.resize(static_cast<size_t>(n));
    for (int64_t tile_index = 0; tile_index < tiles; ++tile_index) {
      const int64_t begin = tile_index * kTileSize, size = std::min<int64_t>(kTileSize, n - begin);
      TileSum& part = tile_sums[static_cast<size_t>(tile_index)];
      part = {};
      const float largest = detail::largest(x + begin, size);
      if (!(largest >= min_value())) continue;
      const Scale tile = tile_scale(largest, scale.factor, logits);
      (logits ? detail::weigh_tile<true> : detail::weigh_tile<false>)(x + begin, tile_weights.data() + begin, size,
                                                                      tile);
      part.sum = detail::sum_weights_from(x + begin, tile_weights.data() + begin, size, tile.lowest);
      part.max_key = bucket(largest);
    }
  }
  // Draws a token from the whole row by the sums of `sum_tiles`.
  int64_t draw_unfiltered(uint64_t random) const {
    const bool infinite = bits_of(maximum) == kInfinityBits;
    const auto rescale_of = [&](const TileSum& part) {
      return rescale_of_tile(from_bits(unordered(part.max_key)), scale, infinite, logits);
    };
    uint64_t total = 0, passed = 0;
    for (const TileSum& part : tile_sums)
      if (part.max_key) total += rescale_of(part).apply(part.sum);
    uint64_t rest = uniform_below(total, random);
    for (size_t tile_index = 0; tile_index < tile_sums.size(); ++tile_index) {
      const TileSum& part = tile_sums[tile_index];
      if (!part.max_key) continue;
      const Rescale rescale = rescale_of(part);
      if (rescale.apply(part.sum) > rest)
        for (int64_t i = static_cast<int64_t>(tile_index) * kTileSize;; ++i) {
          passed += tile_weights[static_cast<size_t>(i)];
          if (rescale.apply(passed) > rest) return i;
        }
      rest -= rescale.apply(part.sum);
    }
    return -1;
  }

  // `lowest` is infinite where no element has probability.
  void renormalise(float lowest, float* y) const {
    const uint64_t total = (logits ? detail::ratios<true> : detail::ratios<false>)(x, y, n, scale, lowest);
    detail::normalise(y, n, total ? kFineOne / static_cast<float>(total) : 0.0f);
  }
  void mask(float lowest, float* y) const { detail::mask(x, y, n, lowest); }

 private:
  // The smallest value that has probability.
  float min_value() const { return logits ? -from_bits(kMaxFiniteBits) : from_bits(kMinPositiveBits); }
  uint32_t weight(int64_t i) const { return w[static_cast<size_t>(i)]; }
  static uint32_t bucket(float value) { return ordered(bits_of(value + 0.0f)); }
};

}  // namespace fi::sampling
