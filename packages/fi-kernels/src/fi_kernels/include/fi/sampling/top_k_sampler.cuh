// Draws from the top-k elements of a row read once: the tile quarters with the k largest maxima contain them all.
#pragma once
#include "fi/sampling/candidates.cuh"
#include "fi/sampling/global_row.cuh"

namespace fi {
namespace sampling {

constexpr int kRadixBins = 256;  // eight per lane

template <int kWarps>
struct TopKSamplerShared {
  CandidateSet candidates;
  alignas(16) uint32_t bins[kRadixBins];
  uint64_t warp_sums[kWarps];
  uint16_t quarters[kMaxCandidates];  // quarters with elements from the bound on
  uint32_t quarter_count, count;
};

// Runs in the CTA that holds the tile sums or quarter maxima of the row.
template <class T, int kWarps>
struct TopKSampler {
  const SampleParams& p;
  const GlobalRow<T>& row;
  TileSum* tiles;
  int n;
  Scale scale;  // set once the row maximum is known
  TopKSamplerShared<kWarps>& shared;

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }
  FI_DEVICE WeightFunction weight_function(uint32_t key) const { return {scale, value_of(key), 0, row.logits}; }
  // Calls f(tile) for each tile with elements from `key` on; the warps alternate.
  template <class F>
  FI_DEVICE void for_tiles_from(uint32_t key, F&& f) const {
    int skip = warp();
#pragma unroll 1
    for (int base = 0; base < n; base += 32) {
      unsigned matches =
          __ballot_sync(0xffffffffu, base + lane() < n && tiles[min(base + lane(), n - 1)].max_key >= key);
#pragma unroll 1
      for (; matches; matches &= matches - 1)
        if (skip-- == 0) {
          skip = kWarps - 1;
          f(base + __ffs(static_cast<int>(matches)) - 1);
        }
    }
  }
  FI_DEVICE uint32_t quarter_key(int i) const { return reinterpret_cast<const uint32_t*>(tiles)[i]; }
  // Returns the k-th largest quarter maximum or a little less, a lower bound of the k-th largest element; 0 if fewer
  // quarters have probability. `max_key` becomes the row maximum.
  FI_DEVICE uint32_t top_k_lower_bound(int k, uint32_t& max_key) const {
    uint32_t high = 0, low = ~0u;
    for (int i = threadIdx.x; i < 4 * n; i += kWarps * 32) {
      const uint32_t key = quarter_key(i);
      high = max(high, key);
      low = min(low, key - 1);
    }
    high = __reduce_max_sync(0xffffffffu, high);
    low = __reduce_min_sync(0xffffffffu, low);
    if (lane() == 0) shared.warp_sums[warp()] = uint64_t{high} << 32 | low;
    __syncthreads();
    const uint64_t ends = lane() < kWarps ? shared.warp_sums[lane()] : 0xffffffffu;
    max_key = high = __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(ends >> 32));
    low = __reduce_min_sync(0xffffffffu, static_cast<uint32_t>(ends)) + 1;  // over nonzero keys
    // Radix passes: find the bin of the k-th largest, then split that bin, until it holds few more keys than k.
    int above = 0;
#pragma unroll 1
    while (true) {
      const int shift = max(24 - __clz(static_cast<int>(high - low)), 0);
      if (threadIdx.x < kRadixBins) shared.bins[threadIdx.x] = 0;
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < 4 * n; i += kWarps * 32) {
        const uint32_t key = quarter_key(i);
        if (key >= low && key <= high) atomicAdd(&shared.bins[(high - key) >> shift], 1u);
      }
      __syncthreads();
      const uint4 first_bins = reinterpret_cast<const uint4*>(shared.bins)[2 * lane()],
                  last_bins = reinterpret_cast<const uint4*>(shared.bins)[2 * lane() + 1];
      const int counts[8] = {static_cast<int>(first_bins.x), static_cast<int>(first_bins.y),
                             static_cast<int>(first_bins.z), static_cast<int>(first_bins.w),
                             static_cast<int>(last_bins.x),  static_cast<int>(last_bins.y),
                             static_cast<int>(last_bins.z),  static_cast<int>(last_bins.w)};
      int own = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) own += counts[i];
      const int inclusive = above + warp_scan(own);
      const unsigned reached = __ballot_sync(0xffffffffu, inclusive >= k);
      if (!reached) return 0;
      int bin = 8 * lane(), before = inclusive - own, up_to = before + counts[0];
#pragma unroll
      for (int i = 1; i < 8; ++i)
        if (up_to < k) before = up_to, up_to += counts[i], ++bin;
      const int owner = __ffs(static_cast<int>(reached)) - 1;
      bin = __shfl_sync(0xffffffffu, bin, owner);
      up_to = __shfl_sync(0xffffffffu, up_to, owner);
      above = __shfl_sync(0xffffffffu, before, owner);
      // The end of the bin, counted down from `high`.
      const uint64_t end = (uint64_t{static_cast<uint32_t>(bin) + 1} << shift) - 1;
      low = end < high - low ? high - static_cast<uint32_t>(end) : low;
      if (shift == 0 || up_to <= k + k / 8) return low;
      high -= static_cast<uint32_t>(bin) << shift;
      __syncthreads();
    }
  }
  // Collects the elements from `key` on as candidates. Returns their number; more than kMaxCandidates if they do not
  // fit.
  FI_DEVICE int collect(uint32_t key) {
    const float lowest = value_of(key);
    for (int i = threadIdx.x; i < 4 * n; i += kWarps * 32) {
      if (quarter_key(i) < key) continue;
      const uint32_t at = atomicAdd(&shared.quarter_count, 1u);
      if (at < kMaxCandidates) shared.quarters[at] = static_cast<uint16_t>(i);
    }
    __syncthreads();
    const int count = shared.quarter_count;
    if (count > kMaxCandidates) return count;
    constexpr int kBatch = 4;
#pragma unroll 1
    for (int i = warp(); i < count; i += kBatch * kWarps) {
      float x[kBatch][4];
      int step;
#pragma unroll
      for (int a = 0; a < kBatch; ++a) {
        const int token = first_token(i + a * kWarps, count, step);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[a][e] = row.at(token + e * step);
      }
      uint32_t bits = 0;
#pragma unroll
      for (int e = 0; e < 4 * kBatch; ++e) bits |= static_cast<uint32_t>(x[e / 4][e % 4] >= lowest) << e;
#pragma unroll 1
      for (; bits; bits &= bits - 1) {
        const int e = __ffs(static_cast<int>(bits)) - 1,
                  token = first_token(i + e / 4 * kWarps, count, step) + e % 4 * step;
        const uint32_t at = atomicAdd(&shared.count, 1u);
        if (at >= kMaxCandidates) break;
        shared.candidates.elements[at] = {key_of(row.at(token)), 1};
        shared.candidates.tokens[at] = token;
      }
    }
    __syncthreads();
    return shared.count;
  }
  // The token of this lane's first element of the i-th collected quarter; past the row if i is out of range.
  FI_DEVICE int first_token(int i, int count, int& step) const {
    const int quarter = i < count ? shared.quarters[i] : 4 * n;
    return row.quarter(quarter / 4, quarter % 4, step);
  }

  // Counts the elements from `key` on, or adds up their weights, in total and by tile. The bisection of
  // `find_threshold` calls it where ties give more elements than the candidate set holds.
  FI_DEVICE uint64_t sum_from(bool by_weight, uint32_t key) {
    const WeightFunction weight = weight_function(key);
    uint64_t all = 0;
    for_tiles_from(key, [&](int tile) {
      uint64_t sum = 0;
#pragma unroll 1
      for (int i = lane(); i < kTileSize; i += 32) {
        const float x = row.at(tile * kTileSize + i);
        sum += by_weight ? weight(x) : static_cast<uint32_t>(x >= weight.lowest);
      }
      sum = warp_sum_u64(sum);
      if (lane() == 0) tiles[tile].sum = sum;
      all += sum;
    });
    if (lane() == 0) shared.warp_sums[warp()] = all;
    __syncthreads();
    all = warp_sum_u64(lane() < kWarps ? shared.warp_sums[lane()] : 0);
    __syncthreads();
    return all;
  }
  FI_DEVICE uint32_t min_p_key(int64_t source) const {
    return key_of(min_p_bound(scale, at(p.min_p, source), row.logits));
  }

  // Draws a token by quarter maxima. Returns false if ties give too many candidates; the tiles then hold their max
  // keys.
  FI_DEVICE bool draw(int output, int64_t source, uint64_t random) {
    const int32_t k = at(p.top_k, source);
    uint32_t max_key, bound = top_k_lower_bound(k, max_key);
    if (max_key == 0) {
      if (threadIdx.x == 0) write_token(p, output, 0, false);
      return true;
    }
    scale = row.scale(max_key, at(p.temperature, source));
    bound = max(key_of(scale.lowest), bound);
    const int count = collect(bound);
    if (count > kMaxCandidates) {
      for (int i = threadIdx.x; i < n; i += kWarps * 32) {
        const QuarterMaxKeys keys = reinterpret_cast<const QuarterMaxKeys*>(tiles)[i];
        tiles[i] = {0, max(max(keys.key[0], keys.key[1]), max(keys.key[2], keys.key[3])), 0};
      }
      __syncthreads();
      return false;
    }
    const auto weight = [&](float x) { return WeightFunction{scale, scale.lowest, 0, row.logits}(x); };
    const auto selection =
        shared.candidates.template filter<kWarps * 32>(count, k, at(p.top_p, source), min_p_key(source), weight);
    const int token = shared.candidates.draw(count, selection.key, uniform_below(selection.total, random));
    if (token >= 0) write_token(p, output, token, true);  // several threads write the same value
    return true;
  }
  // Returns the smallest key that passes all filters, by bisection. The tiles hold their max keys; their sums become
  // weights from that key on.
  FI_DEVICE uint32_t find_threshold(int64_t source) {
    uint32_t max_key = 0;
    for (int j = lane(); j < n; j += 32) max_key = max(max_key, tiles[j].max_key);
    max_key = __reduce_max_sync(0xffffffffu, max_key);
    scale = row.scale(max_key, at(p.temperature, source));
    const int32_t k = at(p.top_k, source);
    const float top_p = at(p.top_p, source);
    uint32_t low = key_of(scale.lowest);
    uint64_t target = k;
#pragma unroll 1
    for (int stage = k > 0 && k < p.vocab ? 0 : 1; stage < 3; ++stage) {  // top-k, top-p, then the final sums
      if (stage == 1 && !(top_p < 1.f)) continue;
      if (stage == 2) low = max(low, min_p_key(source));
      uint32_t high = stage == 2 ? low : max_key;
      bool target_known = stage == 0;
#pragma unroll 1
      do {
        const uint32_t middle = target_known ? low + (high - low + 1) / 2 : low;
        const uint64_t sum = sum_from(stage > 0, middle);
        if (!target_known)
          target_known = true, target = top_p_target(sum, top_p);
        else if (sum >= target)
          low = middle;
        else
          high = middle - 1;
      } while (low < high);
    }
    return low;
  }
};

}  // namespace sampling
}  // namespace fi
