// Finds the smallest element of a cached row that passes top-k and top-p, exactly.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/sampling/row_sampler.cuh"

namespace fi {
namespace sampling {

// Estimates a key range that contains the threshold from a sample of the row. One pass collects the candidates in the
// range and adds up the elements above it. A histogram of the candidates gives the bucket that contains the threshold;
// further histograms split that bucket until few candidates are left, which are compared pairwise. A wrong estimate
// costs another pass, never exactness.
template <class Cluster, class Source, int kWarps>
struct ThresholdSearch {
  using Row = RowSampler<Cluster, Source, kWarps>;
  Row& row;
  SamplerShared<Cluster, kWarps>& shared;
  int buffer = 0;  // which of the two counter buffers is in use

  FI_DEVICE explicit ThresholdSearch(Row& row) : row(row), shared(row.shared) {}

  FI_DEVICE uint32_t contribution(bool by_weight, float x) const { return by_weight ? row.weight(x) : 1u; }

  // Sums the histogram over the cluster, in every CTA. All threads call it, after their last addition.
  FI_DEVICE void reduce_histogram() {
    constexpr unsigned kBatch = 8;  // remote loads in flight
    Cluster::sync();
    for (unsigned b = threadIdx.x; b < kCounters; b += blockDim.x) {
      uint32_t count = 0, before = 0;
      uint64_t sum = 0;
#pragma unroll 1
      for (unsigned r = 0; r < Cluster::size(); r += kBatch) {
        uint4 part[kBatch];
#pragma unroll
        for (unsigned i = 0; i < kBatch; ++i)
          part[i] = r + i < Cluster::size() ? Cluster::read(shared.counters[buffer][b], r + i) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (unsigned i = 0; i < kBatch; ++i) {
          count += part[i].x;
          if (r + i < Cluster::rank()) before += part[i].x;
          sum += (uint64_t{part[i].z} << Cluster::kHighShift) + part[i].y;
        }
      }
      shared.totals[b] = {sum, count, before};
      shared.counters[buffer ^ 1][b] = {};  // all CTAs read it before the barrier above
    }
    if (threadIdx.x == 0) shared.sent_here = 0;
    buffer ^= 1;
    __syncthreads();
  }

  // Adds a warp's sum, below 2^48, to a counter.
  FI_DEVICE void add(int counter, uint64_t sum) {
    constexpr uint64_t part = (uint64_t{1} << Cluster::kHighShift) - 1;
    sum = warp_sum_u64(sum);
    if (row.lane() != 0) return;
    BucketCounter& to = shared.counters[buffer][counter];
    const uint32_t low = static_cast<uint32_t>(sum & part), before = atomicAdd(&to.low, low);
    const uint32_t carry = Cluster::kHighShift == 32 && before > ~low;
    atomicAdd(&to.high, static_cast<uint32_t>(sum >> Cluster::kHighShift) + carry);
  }

  FI_DEVICE static int bucket_shift(KeyRange range) {
    const uint32_t width = range.high - range.low;
    return width < kBuckets ? 0 : 25 - __clz(width);  // width >> shift is below 128
  }
  // Builds the histogram of the candidates over the range: counts, and with `by_weight` weights.
  FI_DEVICE void build_histogram(bool by_weight, KeyRange range) {
    const int shift = bucket_shift(range);
    row.for_each_candidate([&](float x) {
      const uint32_t key = key_of(x);
      if (key >= range.low && key <= range.high)
        Cluster::add(shared.counters[buffer][(key - range.low) >> shift], by_weight ? row.weight(x) : 0u);
    });
  }
  FI_DEVICE uint64_t bucket_contribution(bool by_weight, int bucket) const {
    return by_weight ? shared.totals[bucket].sum : shared.totals[bucket].count;
  }

  // Returns the highest bucket at which `above` plus the buckets from it up reach `target`, or -1 if none does. `above`
  // then includes all buckets above it.
  FI_DEVICE int find_bucket(bool by_weight, uint64_t& above, uint64_t target) const {
#pragma unroll 1
    for (int first = kBuckets - 1; first >= 0; first -= 32) {
      const uint64_t part = bucket_contribution(by_weight, first - row.lane()), inclusive = above + warp_scan(part);
      const unsigned reached = __ballot_sync(0xffffffffu, inclusive >= target);
      if (reached) {
        const int owner = __ffs(static_cast<int>(reached)) - 1;
        above = __shfl_sync(0xffffffffu, inclusive - part, owner);
        return first - owner;
      }
      above = __shfl_sync(0xffffffffu, inclusive, 31);
    }
    return -1;
  }

  // The sample bin of an element: sixteenths of a power of two in probability below the row maximum.
  FI_DEVICE int sample_bin(float x) const {
    const float steps = row.logits ? (row.scale.maximum - x) * (16.f * row.scale.factor)
                                   : static_cast<float>((row.max_key - key_of(x)) >> 19);
    return static_cast<int>(fminf(steps, kSampleBins - 1.f));
  }
  // The key at the lower edge of `bins` bins.
  FI_DEVICE uint32_t key_below(int steps) const {
    if (row.logits) return max(row.min_key, key_of(row.scale.maximum - __fdividef(steps, 16.f * row.scale.factor)));
    return max(row.min_key, row.max_key - min(static_cast<uint32_t>(steps) << 19, row.max_key));
  }
  // Estimates a key range that contains the threshold, wide enough to be right nearly always. An eighth of the elements
  // are sampled; of the largest, which a sample misses, each thread's maximum is known.
  FI_DEVICE KeyRange estimate_range(bool by_weight, uint64_t k, float top_p, int vocab) {
    constexpr int kBinsPerLane = kSampleBins / 32;
    for (int b = threadIdx.x; b <= kSampleBins; b += blockDim.x) shared.sample_bins[b] = 0;
    __syncthreads();
    if (row.thread_max >= row.min_key) atomicAdd(&shared.sample_bins[sample_bin(value_of(row.thread_max))], 1u << 16);
    const float lowest = value_of(row.min_key);
    uint32_t rest = 0;  // weight of the last bin, which holds all smaller elements
#pragma unroll 1
    for (int base = row.begin; base < row.end; base += kTileSize) {
      const auto address = row.source.address(base);
#pragma unroll
      for (int j = 0; j < Row::kVectors; j += Row::kVectors / 2) {
        const float x = row.source.at(address, (32 * j + row.lane()) * Row::kVec);
        if (!(x >= lowest)) continue;
        const int step = sample_bin(x);
        if (step < kSampleBins - 1)
          atomicAdd(&shared.sample_bins[step], 1u);
        else
          rest += row.weight(x);
      }
    }
    rest = __reduce_add_sync(0xffffffffu, rest);  // 2^16 weights of at most 2^15
    if (row.lane() == 0) atomicAdd(&shared.sample_bins[kSampleBins], rest);
    Cluster::sync();
    for (int b = threadIdx.x; b < kSampleBins; b += blockDim.x) {
      uint32_t sum = 0;  // at most 2^16 threads and 2^16 samples: halves overflow only for extreme ties
#pragma unroll 8
      for (unsigned r = 0; r < Cluster::kMaxCtas; ++r)
        if (r < Cluster::size()) sum += Cluster::read(shared.sample_bins[b], r);
      shared.cluster_bins[b] = sum;
    }
    const unsigned rank = row.lane();
    float smaller = static_cast<float>(warp_sum_u64(
        rank < Cluster::size() ? Cluster::read(shared.sample_bins[kSampleBins], min(rank, Cluster::size() - 1)) : 0u));
    smaller *= 8.f / static_cast<float>(row.weight(value_of(row.max_key)));
    __syncthreads();
    // Cumulative over bins up to kBinsPerLane * lane + i: number of elements, and their contribution to the target.
    float count[kBinsPerLane], part[kBinsPerLane], counted = 0.f, parts = 0.f;
    const uint32_t* sampled = shared.cluster_bins + kBinsPerLane * row.lane();
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i) largest += sampled[i] >> 16;
    uint32_t seen = warp_scan(largest);
    const uint32_t threads = __shfl_sync(0xffffffffu, seen, 31);
    seen -= largest;
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i) {
      const uint32_t own = sampled[i] >> 16;
      seen += own;
      // While few threads have a maximum this large, the maxima are nearly all such elements; the correction is for two
      // in one thread. Below that, eight times the sample.
      const float n = seen * 4 <= threads ? __fdividef(own * threads, threads - seen) : 8.f * (sampled[i] & 0xffff);
      count[i] = counted += n;
      part[i] = parts += by_weight ? n * exp2_approx((kBinsPerLane * row.lane() + i) * (-1.f / 16.f)) : n;
    }
    if (row.lane() == 31) part[kBinsPerLane - 1] = parts += by_weight ? smaller : vocab;  // an upper bound
    counted = warp_scan(counted) - counted;
    parts = warp_scan(parts) - parts;
    const float total = __shfl_sync(0xffffffffu, parts + part[kBinsPerLane - 1], 31);
    const float target = by_weight ? top_p * total : static_cast<float>(k);
    const float margin = fmaxf(512.f, static_cast<float>(vocab) / 150.f);
    float until = 0.f;  // elements above the bin in which the target is reached
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i) {
      count[i] += counted;
      part[i] += parts;
      until = part[i] < target ? count[i] : until;
    }
    until = warp_max(until);
    int crossed = 0, first = 0, last = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i) {
      crossed += part[i] < target;
      first += count[i] < until - margin;
      last += count[i] <= until + margin;
    }
    crossed = __reduce_add_sync(0xffffffffu, crossed);
    first = __reduce_add_sync(0xffffffffu, first);
    last = __reduce_add_sync(0xffffffffu, last);
    first = min(first, max(crossed - 1, 0));
    last = max(last, crossed + 2);
    if (crossed + 1 < kSampleBins) last = min(last, kSampleBins - 1);  // the last bin holds all smaller elements
    KeyRange range{last >= kSampleBins ? row.min_key : key_below(last), first == 0 ? row.max_key : key_below(first)};
    range.low = min(range.low, range.high);
    return range;
  }

  // Writes the candidates of the range to all CTAs, each of which compares them pairwise.
  FI_DEVICE uint32_t compare_candidates(bool by_weight, KeyRange range, BucketTotal found, uint64_t above,
                                        uint64_t target) {
    row.for_each_candidate([&](float x) {
      const uint32_t key = key_of(x);
      if (key < range.low || key > range.high) return;
      const unsigned at = found.before + atomicAdd(&shared.sent_here, 1u);
      for (unsigned r = 0; r < Cluster::size(); ++r) Cluster::write(shared.entries[at], r, uint64_t{key} << 32);
    });
    Cluster::sync();
    const int n = static_cast<int>(found.count);
    if (static_cast<int>(threadIdx.x) < n) {
      const uint32_t key = static_cast<uint32_t>(shared.entries[threadIdx.x] >> 32);
      shared.candidates.elements[threadIdx.x] = {key, contribution(by_weight, value_of(key))};
    }
    if (threadIdx.x == 0) shared.candidates.selected_key = range.low;
    __syncthreads();
    return shared.candidates.select_key(n, above, target);
  }

  // Collects all elements from `bound` on in every CTA, with their tokens (slot - first). Returns their number, or -1
  // if they do not fit.
  FI_DEVICE int gather_candidates(uint32_t bound, int first) {
    const unsigned capacity = kMaxCandidates / Cluster::size();
    const float least = value_of(bound);
    row.for_tiles([&](int base) {
      if (row.tile_max(base) < bound) return;
      row.template for_vectors<2>(base, [&](const float (&x)[Row::kVec], int j) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < Row::kVec; ++i) bits |= static_cast<uint32_t>(x[i] >= least) << i;
#pragma unroll 1
        for (; bits; bits &= bits - 1) {
          const int offset = (32 * j + row.lane()) * Row::kVec + __ffs(static_cast<int>(bits)) - 1;
          const unsigned at = atomicAdd(&shared.sent_here, 1u);
          if (at >= capacity) break;
          const uint32_t key = key_of(row.source.at(row.source.address(base), offset));
          const uint64_t entry = uint64_t{key} << 32 | static_cast<uint32_t>(base + offset - first);
          for (unsigned r = 0; r < Cluster::size(); ++r)
            Cluster::write(shared.entries[Cluster::rank() * capacity + at], r, entry);
        }
      });
    });
    __syncthreads();
    if (threadIdx.x < Cluster::size())
      Cluster::write(shared.sent_count[Cluster::rank()], threadIdx.x, shared.sent_here);
    Cluster::sync();
    int n = 0, before = 0;
    bool fits = true;
    const unsigned from = threadIdx.x / capacity, at = threadIdx.x % capacity;
    for (unsigned r = 0; r < Cluster::size(); ++r) {
      const unsigned count = shared.sent_count[r];
      fits &= count <= capacity;
      if (r < from) before += static_cast<int>(count);
      n += static_cast<int>(count);
    }
    if (threadIdx.x == 0) shared.sent_here = 0;
    if (!fits) return -1;
    if (from < Cluster::size() && at < shared.sent_count[from]) {
      const uint64_t entry = shared.entries[from * capacity + at];
      shared.candidates.elements[before + at] = {static_cast<uint32_t>(entry >> 32), 1};
      shared.candidates.tokens[before + at] = static_cast<uint32_t>(entry);
    }
    __syncthreads();
    return n;
  }

  struct Filters {
    int vocab;
    int32_t k;
    float top_p;
    bool joint, sums;  // sums: compute the group sums of the allowed elements
    uint32_t bound;    // a lower bound of the k-th largest key; 0 if unknown
    uint32_t least;    // the smallest key that the other filters allow
  };
  // Returns the smallest key that passes all filters. If all allowed elements are in the candidate set,
  // `candidate_count` is their number, else -1.
  FI_DEVICE uint32_t find(const Filters& filters, int first, int& candidate_count) {
    enum Stage { kGather, kTopK, kTopP, kSum };
    const bool has_top_k = filters.k > 0 && filters.k < filters.vocab, has_top_p = filters.top_p < 1.f;
    const uint32_t all = row.min_key;
    uint32_t lowest = filters.least;
    Stage stage = has_top_k   ? filters.bound > all && !(filters.joint && has_top_p) ? kGather : kTopK
                  : has_top_p ? kTopP
                              : kSum;
    KeyRange range{};
    bool new_stage = true;  // the stage has just begun
    bool splits = false;    // the range is a bucket of the histogram before
    uint64_t above = 0, target = 0;
    candidate_count = -1;
#pragma unroll 1
    for (;;) {
      const bool by_weight = stage >= kTopP;
      if (stage == kGather) {
        candidate_count = gather_candidates(filters.bound, first);
        if (candidate_count >= 0) return filters.bound;
        stage = kTopK;
      }
      if (new_stage) {
        if (stage == kTopK || stage == kTopP)
          range = estimate_range(by_weight, filters.k, filters.top_p, filters.vocab);
        if (stage == kSum) {
          if (filters.sums) row.sum_weights_from(lowest);
          return lowest;
        }
      }
      if (!splits) {
        uint64_t total;
        row.collect(range, by_weight, by_weight || (stage == kTopK && range.high != row.max_key), above, total);
        add(kAboveCounter, above);
        add(kAllCounter, total);
      }
      build_histogram(by_weight, range);
      reduce_histogram();
      new_stage = false;
      if (!splits) {
        above = shared.totals[kAboveCounter].sum;
        target = by_weight ? top_p_target(shared.totals[kAllCounter].sum, filters.top_p) : filters.k;
        if (above >= target) {  // the estimated range is too low
          range = {range.high + 1, row.max_key};
          continue;
        }
      }
      const int bucket = find_bucket(by_weight, above, target);
      if (bucket < 0 && range.low > row.min_key) {  // the estimated range is too high
        range = {row.min_key, range.low - 1};
        continue;
      }
      uint32_t key = row.min_key;
      if (bucket >= 0) {  // that holds one key, one element or few candidates; else it is split by another histogram
        const int shift = bucket_shift(range);
        key = range.low + (static_cast<uint32_t>(bucket) << shift);
        const BucketTotal found = shared.totals[bucket];
        splits = shift > 0 && found.count > 1;
        if (splits) {
          range = {key, key + min(range.high - key, (1u << shift) - 1)};
          if (found.count > kMaxCandidates) continue;
          key = compare_candidates(by_weight, range, found, above, target);
          splits = false;
        }
      }
      lowest = max(lowest, key);
      if (stage == kTopK && has_top_p) {
        if (!filters.joint) row.min_key = key;
        stage = kTopP, new_stage = true;
        continue;
      }
      row.min_key = all;
      if (!filters.sums) return lowest;
      if (row.sums_cover(lowest)) {
        row.add_candidate_weights(lowest);
        return lowest;
      }
      stage = kSum, new_stage = true;
    }
  }
};

}  // namespace sampling
}  // namespace fi
