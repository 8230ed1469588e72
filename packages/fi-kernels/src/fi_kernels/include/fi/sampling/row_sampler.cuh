// One row in the hands of a team of blocks: exact thresholds by bucketed search, sums, a draw, and what is written.
#pragma once
#include "fi/sampling/row.cuh"
#include "fi/sampling/team.cuh"

namespace fi {
namespace sampling {

// One row in the hands of a team. Source: load(slot) gives kVec elements of this block, NaN where there are none; each
// warp owns the pieces [begin, end).
template <class Team, class Source, int kWarps>
struct RowSampler {
  static constexpr int kVec = Source::kVec, kRows = kPiece / (32 * kVec);
  using Piece = float[kRows][kVec];
  Scratch<Team, kWarps>& shared;
  const Source& source;
  int begin, end;  // slots of this warp, whole pieces
  bool logits;
  Scale scale;
  uint32_t top, limit;  // keys of the largest and of the smallest element that may be drawn
  uint32_t mine;        // key of this thread's largest element

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }

  // Of a piece, row j of lane l is slots base + (32 j + l) kVec and on.
  FI_DEVICE void load(int base, Piece& x) const {
#pragma unroll
    for (int j = 0; j < kRows; ++j) to_float(source.load(base + (32 * j + lane()) * kVec), x[j]);
  }
  FI_DEVICE int peak_of(int base) const {
    const int pieces = (end - begin) / kPiece, piece = (base - begin) / kPiece;
    return pieces <= kPeaks ? piece : static_cast<int>(static_cast<int64_t>(piece) * kPeaks / pieces);
  }
  // f(x, base) for each piece that has an element at or above a key.
  template <class F>
  FI_DEVICE void each(uint32_t least, F&& f) const {
#pragma unroll 1
    for (int base = begin; base < end; base += kPiece) {
      if (shared.peak[warp()][peak_of(base)] < least) continue;
      Piece x;
      load(base, x);
      f(x, base);
    }
  }
  FI_DEVICE Weight weight_of(float x) const { return logits ? logit_weight(x, scale) : prob_weight(x, scale); }
  FI_DEVICE uint32_t weight(float x) const { return coarse(weight_of(x)); }
  // Of a row of a piece; 0 for elements below `lowest`.
  FI_DEVICE void weigh(const float (&x)[kVec], float lowest, uint32_t (&w)[kVec]) const {
    if (logits) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[i] = x[i] >= lowest ? coarse(logit_weight(x[i], scale)) : 0u;
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[i] = x[i] >= lowest ? coarse(prob_weight(x[i], scale)) : 0u;
    }
  }

  // The largest element of the row, and of each thread's share. Returns false if no element may be drawn.
  FI_DEVICE bool prepare(float temperature, Range& groups) {
    const float least = logits ? -__uint_as_float(kLargest) : __uint_as_float(kSmallest);
    const auto key_from = [&](float x) { return x >= least ? key_of(x) : 0u; };
    if (lane() < kPeaks) shared.peak[warp()][lane()] = 0, shared.sums[warp()][lane()] = 0;
    __syncwarp();
    uint32_t high = 0;
    mine = 0;
#pragma unroll 1
    for (int base = begin; base < end; base += kPiece) {
      Piece x;
      load(base, x);
      float largest[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        largest[j] = x[j][0];
#pragma unroll
        for (int i = 1; i < kVec; ++i) largest[j] = fmaxf(largest[j], x[j][i]);
      }
#pragma unroll
      for (int j = 1; j < kRows; ++j) largest[0] = fmaxf(largest[0], largest[j]);
      const uint32_t key = key_from(largest[0]), peak = __reduce_max_sync(0xffffffffu, key);
      mine = max(mine, key);
      high = max(high, peak);
      if (lane() == 0) {
        uint32_t& place = shared.peak[warp()][peak_of(base)];
        place = max(place, peak);
      }
    }
    const uint32_t low = __reduce_max_sync(0xffffffffu, mine ? ~mine : 0u);
    publish(shared.ends, uint64_t{high} << 32 | low);
    groups = {0, 0};
    over_warps(shared.ends, [&](uint64_t ends, unsigned) {
      groups.high = max(groups.high, static_cast<uint32_t>(ends >> 32));
      groups.low = max(groups.low, static_cast<uint32_t>(ends));
    });
    groups = {~__reduce_max_sync(0xffffffffu, groups.low), __reduce_max_sync(0xffffffffu, groups.high)};
    top = groups.high;
    if (top == 0) return false;
    scale = logits ? logits_scale(value_of(top), temperature) : probs_scale(value_of(top));
    limit = key_of(scale.lowest);
    return true;
  }

  // Gives a warp's value to the blocks of the team, and waits for those of the others.
  using Values = uint64_t[Team::kLargest][kWarps];
  FI_DEVICE static void publish(Values& values, uint64_t mine) {
    if (lane() < static_cast<int>(Team::size())) Team::write(values[Team::rank()][warp()], lane(), mine);
    Team::sync();
  }
  // f(value, warp of the team), dealt over the lanes.
  template <class F>
  FI_DEVICE static void over_warps(const Values& values, F&& f) {
    for (unsigned i = lane(); i < Team::size() * kWarps; i += 32) f(values[i / kWarps][i % kWarps], i);
  }

  // Adds up the counters of the team, each block some of them for all. Every thread must come, after its last addition.
  FI_DEVICE void collect() {
    constexpr unsigned kAtOnce = 4;  // loads from other blocks in flight
    Team::sync();
    const unsigned size = Team::size(), each = (kCounters + size - 1) / size, first = Team::rank() * each;
    for (unsigned b = first + threadIdx.x; b < min(first + each, static_cast<unsigned>(kCounters)); b += blockDim.x) {
      uint32_t count = 0;
      uint64_t sum = 0;
#pragma unroll 1
      for (unsigned r = 0; r < size; r += kAtOnce) {
        uint4 part[kAtOnce];
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i)
          part[i] = r + i < size ? Team::read(shared.counters[b], r + i) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i) {
          count += part[i].x;
          sum += (uint64_t{part[i].z} << Team::kHighAt) + part[i].y;
        }
      }
      const uint4 total = make_uint4(static_cast<uint32_t>(sum), static_cast<uint32_t>(sum >> 32), count, 0);
      for (unsigned r = 0; r < size; ++r) Team::write(shared.totals[b], r, total);
    }
    Team::sync();
    for (int b = threadIdx.x; b < kCounters; b += blockDim.x) shared.counters[b] = {};
    __syncthreads();
  }

  template <bool kWeights>
  FI_DEVICE uint64_t part_of(int bucket) const {
    return kWeights ? shared.totals[bucket].sum : shared.totals[bucket].count;
  }
  template <bool kWeights>
  FI_DEVICE uint64_t all_buckets() const {
    uint64_t part = 0;
#pragma unroll
    for (int i = 0; i < kBuckets / 32; ++i) part += part_of<kWeights>(lane() + 32 * i);
    return warp_sum_u64(part);
  }

  // The bucket, from the top, with which `above` and the buckets so far first reach the target.
  struct Crossing {
    int bucket;  // -1: above them all, kBuckets: not reached
    uint32_t count;
    uint64_t above;  // the bucket
  };
  template <bool kWeights>
  FI_DEVICE Crossing crossing(uint64_t above, uint64_t target) const {
    constexpr int kEach = kBuckets / 32;
    if (above >= target) return {-1, 0, above};
    uint64_t part = 0;
    const int highest = kBuckets - 1 - lane() * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) part += part_of<kWeights>(highest - i);
    const uint64_t through = above + warp_scan_u64(part);
    const unsigned reached = __ballot_sync(0xffffffffu, through >= target);
    if (reached == 0) return {kBuckets, 0, __shfl_sync(0xffffffffu, through, 31)};
    const int owner = __ffs(reached) - 1;
    Crossing found{highest, 0, through - part};
#pragma unroll
    for (int i = 0; i < kEach - 1; ++i) {
      const uint64_t next = found.above + part_of<kWeights>(found.bucket);
      if (next < target) found.above = next, --found.bucket;
    }
    found.bucket = __shfl_sync(0xffffffffu, found.bucket, owner);
    found.above = __shfl_sync(0xffffffffu, found.above, owner);
    found.count = shared.totals[found.bucket].count;
    return found;
  }

  FI_DEVICE static int bucket_shift(Range range) {
    const uint32_t width = range.high - range.low;
    return width < kBuckets ? 0 : 24 - __clz(width);  // width >> shift is below 256
  }

  // A sum of below 2^48, in parts that one adder each takes from all warps of a block.
  FI_DEVICE static void add_outside(Counter& to, uint64_t sum) {
    constexpr uint64_t part = (uint64_t{1} << Team::kHighAt) - 1;
    if (lane() != 0) return;
    const uint32_t low = static_cast<uint32_t>(sum & part), before = atomicAdd(&to.low, low);
    const uint32_t carry = Team::kHighAt == 32 && before > ~low;
    atomicAdd(&to.high, static_cast<uint32_t>(sum >> Team::kHighAt) + carry);
  }

  // Counts or weighs the elements by their bucket of the range; with `whole`, also those above it and those below.
  template <bool kWeights>
  FI_DEVICE void tally(Range range, bool whole) {
    const float low = value_of(range.low), high = value_of(range.high), lowest = value_of(limit);
    const int shift = bucket_shift(range);
    uint64_t above = 0, below = 0;
    each(whole ? limit : range.low, [&](const Piece& x, int) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        uint32_t w[kVec];
        if (kWeights && whole) weigh(x[j], lowest, w);
        bool any = false;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (whole) {
            const uint32_t part = kWeights ? w[i] : x[j][i] >= lowest;
            above += x[j][i] > high ? part : 0;
            below += x[j][i] < low ? part : 0;
          }
          any |= x[j][i] >= low && x[j][i] <= high;
        }
        if (any) {
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (x[j][i] >= low && x[j][i] <= high) {
              const uint32_t place = key_of(x[j][i]) - range.low;
              Team::add(shared.counters[min(place >> shift, kBuckets - 1u)],
                        kWeights ? (whole ? w[i] : weight(x[j][i])) : 0u);
            }
        }
      }
    });
    if (whole) {
      add_outside(shared.counters[kAbove], warp_sum_u64(above));
      add_outside(shared.counters[kBelow], warp_sum_u64(below));
    }
    collect();
  }

  // The smallest element that is needed so that it and all above it reach the target: a number of elements, or, with
  // weights, a share of the weight of all from `limit` on. Exact: `guess` decides how long it takes.
  template <bool kWeights>
  FI_DEVICE uint32_t search(Range guess, uint64_t target, float share) {
    Range range = guess;
    uint64_t above = 0;
    bool whole = kWeights || range.high != top;
    for (;;) {
      tally<kWeights>(range, whole);
      if (whole) {
        above = shared.totals[kAbove].sum;
        if (kWeights) {
          target = share_of(above + shared.totals[kBelow].sum + all_buckets<true>(), share);
        }
        whole = false;
      }
      const Crossing found = crossing<kWeights>(above, target);
      if (found.bucket < 0) {  // the guess was too low
        range = {range.high + 1, top};
        above = 0;
      } else if (found.bucket == kBuckets) {
        if (range.low <= limit) return limit;
        range = {limit, range.low - 1};
        above = found.above;
      } else {
        const int shift = bucket_shift(range);
        const uint32_t low = range.low + (static_cast<uint32_t>(found.bucket) << shift);
        if (shift == 0 || found.count == 1) return low;
        range = {low, low + min(range.high - low, (1u << shift) - 1)};
        above = found.above;
      }
    }
  }

  // Guesses where the share lies from a sample, some elements a thread; buckets are eighths of a power of two in
  // probability. A share is of elements, or of their weight.
  template <bool kWeights>
  FI_DEVICE Range guess_share(float share) {
    const float per_bucket = 8.f * scale.factor, lowest = value_of(limit);
    if (begin < end) {
      Piece x;
      load(begin, x);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const float at = x[j][0];
        if (!(at >= lowest)) continue;
        const float steps = logits ? (scale.top - at) * per_bucket : static_cast<float>((top - key_of(at)) >> 20);
        Team::add(shared.counters[kBuckets - 1 - static_cast<int>(fminf(steps, kBuckets - 1.f))],
                  kWeights ? weight(at) : 0u);
      }
    }
    collect();
    const float total = static_cast<float>(all_buckets<kWeights>());
    constexpr float margin = 0.01f;
    const auto place = [&](float wanted) {
      return crossing<kWeights>(0, static_cast<uint64_t>(fmaxf(wanted, 0.f) * total) + 1).bucket;
    };
    const int high = place(share - margin), low = place(share + margin);
    const auto key_at = [&](int steps) {  // below the top
      if (logits) return key_of(scale.top - static_cast<float>(steps) / per_bucket);
      const uint32_t down = static_cast<uint32_t>(steps) << 20;
      return top - min(down, top);
    };
    Range range;
    range.high = share <= margin || high >= kBuckets - 1 ? top : key_at(kBuckets - 1 - high);
    range.low = low >= kBuckets || low <= 0 ? limit : key_at(kBuckets - low);
    range.low = max(range.low, limit);
    range.high = max(range.high, range.low);
    return range;
  }

  // From the largest elements of the threads: k of them are at or above the lower end, so the k-th of all is, too.
  FI_DEVICE bool guess_count(Range groups, uint64_t k, Range& range) {
    const int shift = bucket_shift(groups);
    if (mine) Team::add(shared.counters[(mine - groups.low) >> shift], 0u);
    collect();
    const Crossing found = crossing<false>(0, k);
    range = {groups.low + (static_cast<uint32_t>(found.bucket) << shift), top};
    return found.bucket < kBuckets;
  }

  // The smallest key that may be drawn.
  FI_DEVICE uint32_t threshold(Range groups, int vocab, int32_t k, float top_p, float min_p, bool joint) {
    const bool by_count = k > 0 && k < vocab, by_weight = !(top_p >= 1.f);
    const bool few = vocab <= 4096;
    uint32_t kth = limit;
    if (by_count) {
      Range range;
      if (!guess_count(groups, static_cast<uint64_t>(k), range))
        range = few ? Range{limit, top} : guess_share<false>(static_cast<float>(k) / static_cast<float>(vocab));
      kth = search<false>(range, static_cast<uint64_t>(k), 0.f);
    }
    uint32_t lowest = kth;
    if (by_weight) {
      const uint32_t before = limit;
      const bool after_k = by_count && !joint;
      if (after_k) limit = kth;
      const bool all = few || (after_k && k <= 4096);
      lowest = max(kth, search<true>(all ? Range{limit, top} : guess_share<true>(top_p), 0, top_p));
      limit = before;
    }
    return max(lowest, key_of(min_p_bound(scale, min_p, logits)));
  }

  // The weight of all elements from `lowest` on, of this warp's own, and of those that come before them in the row.
  template <bool kFine>
  FI_DEVICE uint64_t total_weight(float lowest, uint64_t& before, uint64_t& own) {
    own = 0;
    each(key_of(lowest), [&](const Piece& x, int base) {
      uint64_t sum = 0;
      if constexpr (kFine) {
#pragma unroll
        for (int j = 0; j < kRows; ++j)
#pragma unroll
          for (int i = 0; i < kVec; ++i) sum += x[j][i] >= lowest ? fine(weight_of(x[j][i])) : 0;
      } else {
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          uint32_t w[kVec];
          weigh(x[j], lowest, w);
#pragma unroll
          for (int i = 0; i < kVec; ++i) sum += w[i];
        }
      }
      sum = warp_sum_u64(sum);
      if (lane() == 0) shared.sums[warp()][peak_of(base)] += sum;
      own += sum;
    });
    publish(shared.weights, own);
    uint64_t total = 0;
    before = 0;
    const unsigned me = Team::rank() * kWarps + warp();
    over_warps(shared.weights, [&](uint64_t part, unsigned of) {
      total += part;
      if (of < me) before += part;
    });
    before = warp_sum_u64(before);
    return warp_sum_u64(total);
  }

  // The slot at which the weights from `lowest` on, summed in order from this warp's first, pass `target`.
  FI_DEVICE int locate(float lowest, uint64_t target) const {
    const uint64_t sum = lane() < kPeaks ? shared.sums[warp()][lane()] : 0, up_to = warp_scan_u64(sum);
    const int place = __ffs(__ballot_sync(0xffffffffu, up_to > target)) - 1;
    uint64_t passed = __shfl_sync(0xffffffffu, up_to - sum, max(place, 0));
    int found = -1;
    each(key_of(lowest), [&](const Piece& x, int base) {
      if (found >= 0 || peak_of(base) != place) return;
      uint32_t w[kRows][kVec];
      uint64_t part[kRows], through[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        weigh(x[j], lowest, w[j]);
        part[j] = 0;
#pragma unroll
        for (int i = 0; i < kVec; ++i) part[j] += w[j][i];
        through[j] = warp_scan_u64(part[j]);
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const uint64_t mine = passed + through[j];
        const unsigned reached = __ballot_sync(0xffffffffu, mine > target);
        if (reached && found < 0) {
          uint64_t sum = mine - part[j];
          int at = 0;
#pragma unroll
          for (int i = 0; i < kVec - 1; ++i) {
            sum += w[j][i];
            at += sum <= target;
          }
          found = base + (32 * j + lane()) * kVec + at;
          found = __shfl_sync(0xffffffffu, found, __ffs(reached) - 1);
        }
        passed = __shfl_sync(0xffffffffu, mine, 31);
      }
    });
    return found;
  }

  // Writes each element as f(x): a renormalised probability, or the element itself where it is kept.
  template <class O, class F>
  FI_DEVICE void write(O* out, int first, int last, F&& f) const {
    const bool aligned = reinterpret_cast<uint64_t>(out - first) % 16 == 0;
    const int from = max(begin, first), until = min(end, last);
    each(0, [&](const Piece& x, int base) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int slot = base + (32 * j + lane()) * kVec;
        float y[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = f(x[j][i]);
        O* to = out - first + slot;
        if (aligned && slot >= from && slot + kVec <= until) {
          constexpr int kAtOnce = kVec * sizeof(O) > 16 ? 16 / sizeof(O) : kVec;
#pragma unroll
          for (int i = 0; i < kVec; i += kAtOnce) {
            float z[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) z[k] = y[i + k];
            Vec<O, kAtOnce> rounded;
            from_float(z, rounded);
            store(to + i, rounded);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (slot + i >= from && slot + i < until) to[i] = from_float<O>(y[i]);
        }
      }
    });
  }
  template <class O>
  FI_DEVICE void write_renormalised(O* out, int first, int last, float lowest, uint64_t total) const {
    const float inverse = total ? __fdiv_rn(kFineOne, static_cast<float>(total)) : 0.f;
    write(out, first, last, [&](float x) {
      const float y = logits ? logit_ratio(x, scale) : prob_ratio(x, scale);
      return x >= lowest ? fminf(times(y, inverse), 1.f) : x != x ? x : 0.f;
    });
  }
};

}  // namespace sampling
}  // namespace fi
