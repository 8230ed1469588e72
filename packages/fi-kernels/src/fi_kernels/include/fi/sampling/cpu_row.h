// One row on the CPU: the loops over its elements, and the search for the smallest element that may be drawn.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "fi/cpu/reduce.h"
#include "fi/cpu/target.h"
#include "fi/sampling/piece.h"

namespace fi::sampling {
namespace detail {

FI_CLONES inline float largest(const float* x, int64_t n) {
  return cpu::maximum(n, [=](int64_t i) __attribute__((always_inline)) { return x[i]; });
}
FI_CLONES inline void weigh_logits(const float* x, uint32_t* w, int64_t n, Scale s) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = cpu::select(x[i] >= s.lowest, coarse(logit_weight(x[i], s)), 0u);
}
FI_CLONES inline void weigh_probs(const float* x, uint32_t* w, int64_t n, Scale s) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = cpu::select(x[i] >= s.lowest, coarse(prob_weight(x[i], s)), 0u);
}
// By the scale of a piece.
FI_CLONES inline void weigh_piece(const float* x, uint32_t* w, int64_t n, Scale s, bool logits) {
  if (logits) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) w[i] = cpu::select(x[i] >= s.lowest, piece_weight(logit_weight(x[i], s)), 0u);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) w[i] = cpu::select(x[i] >= s.lowest, piece_weight(prob_weight(x[i], s)), 0u);
  }
}
FI_CLONES inline uint64_t sum_from(const float* x, const uint32_t* w, int64_t n, float lowest) {
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += cpu::select(x[i] >= lowest, w[i], 0u);
  return sum;
}
// y: first the ratio of each element from `lowest` on to the largest, 0 of the others; returns the sum, in fine
// weights.
FI_CLONES inline uint64_t ratios_of_logits(const float* x, float* y, int64_t n, Scale s, float lowest) {
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t keep = 0 - uint64_t(x[i] >= lowest);
    y[i] = cpu::select(x[i] >= lowest, logit_ratio(x[i], s), 0.0f);
    sum += fine(logit_weight(x[i], s)) & keep;
  }
  return sum;
}
FI_CLONES inline uint64_t ratios_of_probs(const float* x, float* y, int64_t n, Scale s, float lowest) {
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t keep = 0 - uint64_t(x[i] >= lowest);
    y[i] = cpu::select(x[i] >= lowest, prob_ratio(x[i], s), 0.0f);
    sum += fine(prob_weight(x[i], s)) & keep;
  }
  return sum;
}
FI_CLONES inline void normalise(const float* x, float* y, int64_t n, float inverse) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float value = y[i] * inverse;
    y[i] = cpu::select(x[i] != x[i], x[i], cpu::select(value > 1.0f, 1.0f, value));
  }
}
FI_CLONES inline void mask(const float* x, float* y, int64_t n, float lowest) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = cpu::select(x[i] >= lowest, x[i], cpu::select(x[i] != x[i], x[i], -HUGE_VALF));
}
FI_CLONES inline void group_maxima(const float* x, float* top, int64_t groups, int64_t each) {
  for (int64_t g = 0; g < groups; ++g) {
    float best = -HUGE_VALF;
#pragma omp simd reduction(max : best)
    for (int64_t i = 0; i < each; ++i) {
      const float value = x[g * each + i];
      best = value > best ? value : best;
    }
    top[g] = best;
  }
}

}  // namespace detail

struct CpuRow {
  int64_t n;
  bool logits;
  const float* x;  // the elements: buffer, or the row itself
  float top = 0.0f;
  Scale scale{};
  std::vector<float> buffer, results;
  std::vector<uint32_t> w;  // weights of the elements from scale.lowest on
  std::vector<uint32_t> piece_weights;
  std::vector<std::pair<float, uint32_t>> chosen;
  std::vector<float> some;
  std::vector<PieceSum> sums;

  CpuRow(int64_t n, bool logits) : n(n), logits(logits), x(nullptr) {}

  // Room for elements that have to be converted or changed.
  float* own() {
    buffer.resize(static_cast<size_t>(n));
    x = buffer.data();
    return buffer.data();
  }
  // Finds the scale; false if no element may be drawn.
  bool prepare(float temperature) {
    top = detail::largest(x, n);
    if (!(top >= least())) return false;
    scale = logits ? logits_scale(top, temperature) : probs_scale(top);
    return true;
  }
  void weigh() {
    w.resize(static_cast<size_t>(n));
    (logits ? detail::weigh_logits : detail::weigh_probs)(x, w.data(), n, scale);
  }

  // The k-th largest element, or `lowest` if there are fewer. First bounded by the k-th largest of the groups' maxima.
  float kth(int64_t k, float lowest) {
    constexpr int64_t each = 64;
    const int64_t groups = n / each;
    float bound = lowest;
    if (k <= groups / 2) {
      some.resize(static_cast<size_t>(groups));
      detail::group_maxima(x, some.data(), groups, each);
      std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<float>());
      bound = std::max(bound, some[static_cast<size_t>(k - 1)]);
    }
    some.clear();
    for (int64_t i = 0; i < n; ++i)
      if (x[i] >= bound) some.push_back(x[i]);
    if (static_cast<int64_t>(some.size()) < k) return lowest;
    std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<float>());
    return some[static_cast<size_t>(k - 1)];
  }

  // The smallest element that is needed to reach a share of the weight of all from `lowest` on.
  float share(float p, float lowest) {
    constexpr int shift = 20;  // buckets of an eighth of a power of two
    std::vector<uint64_t> sums(size_t{1} << (32 - shift));
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i)
      if (x[i] >= lowest) {
        sums[bucket(x[i]) >> shift] += weight(i);
        total += weight(i);
      }
    const uint64_t target = share_of(total, p);
    uint64_t above = 0;
    size_t crossing = sums.size();
    while (crossing > 0 && above + sums[crossing - 1] < target) above += sums[--crossing];
    if (crossing == 0) return lowest;
    --crossing;
    chosen.clear();
    for (int64_t i = 0; i < n; ++i)
      if (x[i] >= lowest && bucket(x[i]) >> shift == crossing) chosen.emplace_back(x[i], weight(i));
    std::sort(chosen.begin(), chosen.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [value, part] : chosen) {
      above += part;
      if (above >= target) return value;
    }
    return lowest;
  }

  float threshold(int64_t k, float top_p, float min_p, bool joint) {
    float lowest = scale.lowest;
    if (k > 0 && k < n) lowest = kth(k, lowest);
    if (!(top_p >= 1.0f)) lowest = std::max(lowest, share(top_p, joint ? scale.lowest : lowest));
    return std::max(lowest, min_p_bound(scale, min_p, logits));
  }

  // The first element at which the weights from `lowest` on, summed in order, pass target < their total.
  int64_t locate(float lowest, uint64_t target) const {
    constexpr int64_t chunk = 4096;
    uint64_t passed = 0;
    for (int64_t i = 0; i < n; i += chunk) {
      const int64_t size = std::min(chunk, n - i);
      const uint64_t part = detail::sum_from(x + i, w.data() + i, size, lowest);
      if (passed + part > target)
        for (int64_t j = i;; ++j) {
          if (x[j] >= lowest) passed += weight(j);
          if (passed > target) return j;
        }
      passed += part;
    }
    return n - 1;
  }
  uint64_t total(float lowest) const { return detail::sum_from(x, w.data(), n, lowest); }

  // Sums of pieces, for draws from all of the row.
  void sum_pieces() {
    const int64_t pieces = (n + kPiece - 1) / kPiece;
    sums.resize(static_cast<size_t>(pieces));
    piece_weights.resize(static_cast<size_t>(n));
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = piece * kPiece, size = std::min<int64_t>(kPiece, n - begin);
      PieceSum& part = sums[static_cast<size_t>(piece)];
      part = {};
      const float largest = detail::largest(x + begin, size);
      if (!(largest >= least())) continue;
      const Scale own = piece_scale(largest, scale.factor, logits);
      detail::weigh_piece(x + begin, piece_weights.data() + begin, size, own, logits);
      part.sum = detail::sum_from(x + begin, piece_weights.data() + begin, size, own.lowest);
      part.key = bucket(largest);
    }
  }
  // A token of all of the row, of which the pieces are summed.
  int64_t draw_plain(uint64_t random) const {
    const bool infinite = bits_of(top) == kInfinity;
    const auto portion_of_piece = [&](const PieceSum& part) {
      return portion_of(of_bits(unordered(part.key)), scale, infinite, logits);
    };
    uint64_t total = 0, passed = 0;
    for (const PieceSum& part : sums)
      if (part.key) total += portion_of_piece(part).of(part.sum);
    uint64_t rest = uniform_below(total, random);
    for (size_t piece = 0; piece < sums.size(); ++piece) {
      const PieceSum& part = sums[piece];
      if (!part.key) continue;
      const Portion portion = portion_of_piece(part);
      if (portion.of(part.sum) > rest)
        for (int64_t i = static_cast<int64_t>(piece) * kPiece;; ++i) {
          passed += piece_weights[static_cast<size_t>(i)];
          if (portion.of(passed) > rest) return i;
        }
      rest -= portion.of(part.sum);
    }
    return -1;
  }

  void renormalise(bool valid, float lowest, float* y) const {
    uint64_t total = 0;
    if (valid)
      total = (logits ? detail::ratios_of_logits : detail::ratios_of_probs)(x, y, n, scale, lowest);
    else
      std::fill_n(y, n, 0.0f);
    detail::normalise(x, y, n, total ? kFineOne / static_cast<float>(total) : 0.0f);
  }
  void mask(float lowest, float* y) const { detail::mask(x, y, n, lowest); }

 private:
  float least() const { return logits ? -of_bits(kLargest) : of_bits(kSmallest); }  // that may be drawn
  uint32_t weight(int64_t i) const { return w[static_cast<size_t>(i)]; }
  static uint32_t bucket(float value) { return ordered(bits_of(value + 0.0f)); }
};

}  // namespace fi::sampling
