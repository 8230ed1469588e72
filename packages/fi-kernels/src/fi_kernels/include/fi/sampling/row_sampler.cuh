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
  // f(x, slot) for the vectors of such pieces: short code, for what is not done with every element.
  template <class F>
  FI_DEVICE void each_vector(uint32_t least, F&& f) const {
#pragma unroll 1
    for (int base = begin; base < end; base += kPiece) {
      if (shared.peak[warp()][peak_of(base)] < least) continue;
#pragma unroll 1
      for (int slot = base + lane() * kVec; slot < base + kPiece; slot += 32 * kVec) {
        float x[kVec];
        to_float(source.load(slot), x);
        f(x, slot);
      }
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

  FI_DEVICE uint64_t part_of(bool weights, int bucket) const {
    return weights ? shared.totals[bucket].sum : shared.totals[bucket].count;
  }
  FI_DEVICE uint64_t all_buckets(bool weights) const {
    uint64_t part = 0;
#pragma unroll 1
    for (int i = lane(); i < kBuckets; i += 32) part += part_of(weights, i);
    return warp_sum_u64(part);
  }

  // The bucket, from the top, with which `above` and the buckets so far first reach the target.
  struct Crossing {
    int bucket;  // -1: above them all, kBuckets: not reached
    uint32_t count;
    uint64_t above;  // the bucket
  };
  FI_DEVICE Crossing crossing(bool weights, uint64_t above, uint64_t target) const {
    if (above >= target) return {-1, 0, above};
#pragma unroll 1
    for (int first = kBuckets - 1; first >= 0; first -= 32) {
      const uint64_t part = part_of(weights, first - lane()), sum = warp_sum_u64(part);
      if (above + sum >= target) {
        const uint64_t through = above + warp_scan_u64(part);
        const int owner = __ffs(__ballot_sync(0xffffffffu, through >= target)) - 1, bucket = first - owner;
        return {bucket, shared.totals[bucket].count, __shfl_sync(0xffffffffu, through - part, owner)};
      }
      above += sum;
    }
    return {kBuckets, 0, above};
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
  FI_DEVICE void tally(bool weights, Range range, bool whole) const {
    const float low = value_of(range.low), high = value_of(range.high), lowest = value_of(limit);
    const int shift = bucket_shift(range);
    uint64_t above = 0, below = 0;
    each_vector(whole ? limit : range.low, [&](const float (&x)[kVec], int) {
      uint32_t w[kVec] = {};
      bool any = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) any |= x[i] >= low && x[i] <= high;
      if (weights && (whole || any)) weigh(x, lowest, w);
      if (whole) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const uint32_t part = weights ? w[i] : x[i] >= lowest;
          above += x[i] > high ? part : 0;
          below += x[i] < low ? part : 0;
        }
      }
      if (any) {
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          if (x[i] >= low && x[i] <= high)
            Team::add(shared.counters[min((key_of(x[i]) - range.low) >> shift, kBuckets - 1u)], w[i]);
      }
    });
    if (whole) {
      add_outside(shared.counters[kAbove], warp_sum_u64(above));
      add_outside(shared.counters[kBelow], warp_sum_u64(below));
    }
  }

  // Some elements of each thread by their bucket of an eighth of a power of two in probability.
  FI_DEVICE void tally_sample(bool weights) const {
    const float per_bucket = 8.f * scale.factor, lowest = value_of(limit);
#pragma unroll 1
    for (int j = 0; j < kRows && begin < end; ++j) {
      float x[kVec];
      to_float(source.load(begin + (32 * j + lane()) * kVec), x);
      if (!(x[0] >= lowest)) continue;
      const float steps = logits ? (scale.top - x[0]) * per_bucket : static_cast<float>((top - key_of(x[0])) >> 20);
      Team::add(shared.counters[kBuckets - 1 - static_cast<int>(fminf(steps, kBuckets - 1.f))],
                weights ? weight(x[0]) : 0u);
    }
  }
  // The key so many buckets of a sample below the top.
  FI_DEVICE uint32_t key_down(int buckets) const {
    if (logits) return key_of(scale.top - static_cast<float>(buckets) / (8.f * scale.factor));
    return top - min(static_cast<uint32_t>(buckets) << 20, top);
  }

  // The smallest element that is needed so that it and all above it reach the target: k elements, or, with weights, a
  // share of the weight of all from `limit` on. What is known or guessed before decides how long it takes, not what is
  // found: k of the threads' largest elements are at or above the k-th of them, so the k-th of all is, too; a sample
  // says where a share lies.
  FI_DEVICE uint32_t search(bool weights, uint64_t k, float share, Range groups, bool few) {
    enum Pass { kThreads, kSample, kAll };
    Pass pass = !weights ? kThreads : few ? kAll : kSample;
    Range range = weights ? Range{limit, top} : groups;
    uint64_t above = 0, target = k;
    bool whole = weights;
#pragma unroll 1
    for (;;) {
      if (pass == kAll)
        tally(weights, range, whole);
      else if (pass == kSample)
        tally_sample(weights);
      else if (mine)
        Team::add(shared.counters[(mine - groups.low) >> bucket_shift(groups)], 0u);
      collect();
      float total = 0.f;
      if (pass == kSample) total = static_cast<float>(all_buckets(weights));
      if (pass == kAll && whole) {
        above = shared.totals[kAbove].sum;
        if (weights) target = share_of(above + shared.totals[kBelow].sum + all_buckets(true), share);
        whole = false;
      }
      Crossing found;
      int guessed = kBuckets;  // the bucket in which the upper end of the range is
#pragma unroll 1
      for (int end = pass == kSample; end >= 0; --end) {
        constexpr float margin = 0.01f;
        const float wanted = end ? share - margin : share + margin;
        found =
            crossing(weights, above, pass == kSample ? static_cast<uint64_t>(fmaxf(wanted, 0.f) * total) + 1 : target);
        if (end) guessed = found.bucket;
      }
      if (pass == kSample) {
        range = {limit, top};
        if (share > 0.01f && guessed < kBuckets - 1) range.high = max(limit, key_down(kBuckets - 1 - guessed));
        if (found.bucket > 0 && found.bucket < kBuckets) range.low = max(limit, key_down(kBuckets - found.bucket));
        range.low = min(range.low, range.high);
        pass = kAll;
        whole = weights || range.high != top;
      } else if (pass == kThreads) {
        range = {limit, top};
        if (found.bucket < kBuckets)
          range.low = groups.low + (static_cast<uint32_t>(found.bucket) << bucket_shift(groups));
        pass = found.bucket < kBuckets || few ? kAll : kSample;
      } else if (found.bucket < 0) {  // the guess was too low
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

  // The smallest key that may be drawn.
  FI_DEVICE uint32_t threshold(Range groups, int vocab, int32_t k, float top_p, float min_p, bool joint) {
    const bool by_count = k > 0 && k < vocab, by_weight = !(top_p >= 1.f), few = vocab <= 4096;
    const uint32_t all = limit;
    uint32_t lowest = limit;
#pragma unroll 1
    for (int stage = 0; stage < 2; ++stage) {
      const bool weights = stage == 1, after_k = weights && by_count && !joint;
      if (!(weights ? by_weight : by_count)) continue;
      if (after_k) limit = lowest;
      const float share = weights ? top_p : static_cast<float>(k) / static_cast<float>(vocab);
      lowest = max(lowest, search(weights, static_cast<uint64_t>(k), share, groups, few || (after_k && k <= 4096)));
      limit = all;
    }
    return max(lowest, key_of(min_p_bound(scale, min_p, logits)));
  }

  // The weight of all elements from `lowest` on, of this warp's own, and of those that come before them in the row.
  template <bool kFine>
  FI_DEVICE uint64_t total_weight(float lowest, uint64_t& before, uint64_t& own) {
    own = 0;
    const uint32_t least = key_of(lowest);
    const auto add = [&](uint64_t sum, int base) {
      sum = warp_sum_u64(sum);
      if (lane() == 0) shared.sums[warp()][peak_of(base)] += sum;
      own += sum;
    };
    if constexpr (kFine) {
      each_vector(least, [&](const float (&x)[kVec], int slot) {
        uint64_t sum = 0;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += x[i] >= lowest ? fine(weight_of(x[i])) : 0;
        own += sum;
      });
      own = warp_sum_u64(own);
    } else {
      each(least, [&](const Piece& x, int base) {
        uint64_t sum = 0;
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          uint32_t w[kVec];
          weigh(x[j], lowest, w);
#pragma unroll
          for (int i = 0; i < kVec; ++i) sum += w[i];
        }
        add(sum, base);
      });
    }
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
    each_vector(key_of(lowest), [&](const float (&x)[kVec], int slot) {
      if (found >= 0 || peak_of(begin + (slot - begin) / kPiece * kPiece) != place) return;
      uint32_t w[kVec];
      weigh(x, lowest, w);
      uint64_t part = 0;
#pragma unroll
      for (int i = 0; i < kVec; ++i) part += w[i];
      const uint64_t through = passed + warp_scan_u64(part);
      const unsigned reached = __ballot_sync(0xffffffffu, through > target);
      if (reached) {
        uint64_t sum = through - part;
        int at = 0;
#pragma unroll
        for (int i = 0; i < kVec - 1; ++i) {
          sum += w[i];
          at += sum <= target;
        }
        found = __shfl_sync(0xffffffffu, slot + at, __ffs(reached) - 1);
      }
      passed = __shfl_sync(0xffffffffu, through, 31);
    });
    return found;
  }

  // Writes each element as f(x): a renormalised probability, or the element itself where it is kept.
  template <class O, class F>
  FI_DEVICE void write(O* out, int first, int last, F&& f) const {
    const bool aligned = reinterpret_cast<uint64_t>(out - first) % 16 == 0;
    const int from = max(begin, first), until = min(end, last);
    each_vector(0, [&](const float (&x)[kVec], int slot) {
      float y[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = f(x[i]);
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
