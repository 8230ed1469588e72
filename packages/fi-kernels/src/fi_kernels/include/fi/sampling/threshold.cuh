// The smallest element of a row that may be drawn: by rank, by share of the weight, by probability.
#pragma once
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/sampling/row_sampler.cuh"

namespace fi {
namespace sampling {

// A guess says between which keys the threshold lies. One pass marks the elements there and adds up the others; what
// is marked is then sorted into buckets, and the bucket in which the target is reached again, until few elements are
// left, which are compared with each other. A wrong guess costs a second pass, never exactness.
template <class Team, class Source, int kWarps>
struct Threshold {
  using Row = RowSampler<Team, Source, kWarps>;
  Row& row;
  Scratch<Team, kWarps>& shared;
  int turn = 0;  // which counters are in use

  FI_DEVICE explicit Threshold(Row& row) : row(row), shared(row.shared) {}

  FI_DEVICE uint32_t part_of(bool weights, float x) const { return weights ? row.weight(x) : 1u; }

  // Adds up the counters of the team, in every block. Every thread must come, after its last addition.
  FI_DEVICE void exchange() {
    constexpr unsigned kAtOnce = 8;  // loads from other blocks in flight
    Team::sync();
    for (unsigned b = threadIdx.x; b < kCounters; b += blockDim.x) {
      uint32_t count = 0, before = 0;
      uint64_t sum = 0;
#pragma unroll 1
      for (unsigned r = 0; r < Team::size(); r += kAtOnce) {
        uint4 part[kAtOnce];
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i)
          part[i] = r + i < Team::size() ? Team::read(shared.counters[turn][b], r + i) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (unsigned i = 0; i < kAtOnce; ++i) {
          count += part[i].x;
          if (r + i < Team::rank()) before += part[i].x;
          sum += (uint64_t{part[i].z} << Team::kHighAt) + part[i].y;
        }
      }
      shared.totals[b] = {sum, count, before};
      shared.counters[turn ^ 1][b] = {};  // all blocks have read it before they came here
    }
    if (threadIdx.x == 0) shared.mine = 0;
    turn ^= 1;
    __syncthreads();
  }

  // A sum of below 2^48, in parts that one adder each takes from all warps of a block.
  FI_DEVICE void add(int counter, uint64_t sum) {
    constexpr uint64_t part = (uint64_t{1} << Team::kHighAt) - 1;
    sum = warp_sum_u64(sum);
    if (row.lane() != 0) return;
    Counter& to = shared.counters[turn][counter];
    const uint32_t low = static_cast<uint32_t>(sum & part), before = atomicAdd(&to.low, low);
    const uint32_t carry = Team::kHighAt == 32 && before > ~low;
    atomicAdd(&to.high, static_cast<uint32_t>(sum >> Team::kHighAt) + carry);
  }

  FI_DEVICE static int bucket_shift(Range range) {
    const uint32_t width = range.high - range.low;
    return width < kBuckets ? 0 : 25 - __clz(width);  // width >> shift is below 128
  }
  // Counts or weighs the marked elements by their bucket of the range.
  FI_DEVICE void tally(bool weights, Range range) {
    const int shift = bucket_shift(range);
    row.each_marked([&](float x) {
      const uint32_t key = key_of(x);
      if (key >= range.low && key <= range.high)
        Team::add(shared.counters[turn][(key - range.low) >> shift], weights ? row.weight(x) : 0u);
    });
  }
  FI_DEVICE uint64_t bucket_part(bool weights, int bucket) const {
    return weights ? shared.totals[bucket].sum : shared.totals[bucket].count;
  }

  // The bucket, from the top, with which `above` and the buckets so far first reach the target; -1 if none does.
  // `above` becomes what is above the bucket.
  FI_DEVICE int crossing(bool weights, uint64_t& above, uint64_t target) const {
#pragma unroll 1
    for (int first = kBuckets - 1; first >= 0; first -= 32) {
      const uint64_t part = bucket_part(weights, first - row.lane()), through = above + warp_scan(part);
      const unsigned reached = __ballot_sync(0xffffffffu, through >= target);
      if (reached) {
        const int owner = __ffs(static_cast<int>(reached)) - 1;
        above = __shfl_sync(0xffffffffu, through - part, owner);
        return first - owner;
      }
      above = __shfl_sync(0xffffffffu, through, 31);
    }
    return -1;
  }

  // The bucket of a sample in which an element lies: sixteenths of a power of two in probability below the top.
  FI_DEVICE int step_of(float x) const {
    const float steps =
        row.logits ? (row.scale.top - x) * (16.f * row.scale.factor) : static_cast<float>((row.top - key_of(x)) >> 19);
    return static_cast<int>(fminf(steps, kSteps - 1.f));
  }
  // The key so many steps below the top.
  FI_DEVICE uint32_t key_down(int steps) const {
    if (row.logits) return max(row.limit, key_of(row.scale.top - __fdividef(steps, 16.f * row.scale.factor)));
    return max(row.limit, row.top - min(static_cast<uint32_t>(steps) << 19, row.top));
  }
  // Where the target probably lies: by an eighth of the elements, and for the largest, of which a sample says little,
  // by the largest of each thread. As wide as a share of the elements allows.
  FI_DEVICE Range guess(bool weights, uint64_t k, float share, int vocab) {
    constexpr int kEach = kSteps / 32;
    for (int b = threadIdx.x; b <= kSteps; b += blockDim.x) shared.sample[b] = 0;
    __syncthreads();
    if (row.mine >= row.limit) atomicAdd(&shared.sample[step_of(value_of(row.mine))], 1u << 16);
    const float lowest = value_of(row.limit);
    uint32_t rest = 0;  // weight of what is in the last step, all smaller elements
#pragma unroll 1
    for (int base = row.begin; base < row.end; base += kPiece) {
      const auto place = row.source.place(base);
#pragma unroll
      for (int j = 0; j < Row::kRows; j += Row::kRows / 2) {
        const float x = row.source.at(place, (32 * j + row.lane()) * Row::kVec);
        if (!(x >= lowest)) continue;
        const int step = step_of(x);
        if (step < kSteps - 1)
          atomicAdd(&shared.sample[step], 1u);
        else
          rest += row.weight(x);
      }
    }
    rest = __reduce_add_sync(0xffffffffu, rest);  // 2^16 of at most 2^15
    if (row.lane() == 0) atomicAdd(&shared.sample[kSteps], rest);
    Team::sync();
    for (int b = threadIdx.x; b < kSteps; b += blockDim.x) {
      uint32_t sum = 0;  // at most 2^16 threads, and of 2^19 elements one in eight: carries cannot occur but in ties
#pragma unroll 8
      for (unsigned r = 0; r < Team::kLargest; ++r)
        if (r < Team::size()) sum += Team::read(shared.sample[b], r);
      shared.sampled[b] = sum;
    }
    const unsigned of = row.lane();
    float smaller = static_cast<float>(
        warp_sum_u64(of < Team::size() ? Team::read(shared.sample[kSteps], min(of, Team::size() - 1)) : 0u));
    smaller *= 8.f / static_cast<float>(row.weight(value_of(row.top)));
    __syncthreads();
    // Of step kEach * lane + i and all before: elements, and what they add to the target.
    float count[kEach], part[kEach], counted = 0.f, parts = 0.f;
    const uint32_t* sampled = shared.sampled + kEach * row.lane();
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) largest += sampled[i] >> 16;
    uint32_t seen = warp_scan(largest);
    const uint32_t threads = __shfl_sync(0xffffffffu, seen, 31);
    seen -= largest;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t own = sampled[i] >> 16;
      seen += own;
      // Where few threads have one of them, all are seen, but that two may be one thread's.
      const float n = seen * 4 <= threads ? __fdividef(own * threads, threads - seen) : 8.f * (sampled[i] & 0xffff);
      count[i] = counted += n;
      part[i] = parts += weights ? n * exp2_approx((kEach * row.lane() + i) * (-1.f / 16.f)) : n;
    }
    if (row.lane() == 31) part[kEach - 1] = parts += weights ? smaller : vocab;  // more than there can be
    counted = warp_scan(counted) - counted;
    parts = warp_scan(parts) - parts;
    const float total = __shfl_sync(0xffffffffu, parts + part[kEach - 1], 31);
    const float target = weights ? share * total : static_cast<float>(k);
    const float room = fmaxf(512.f, static_cast<float>(vocab) / 150.f);
    float until = 0.f;  // elements before the target is reached
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      count[i] += counted;
      part[i] += parts;
      until = part[i] < target ? count[i] : until;
    }
    until = warp_max(until);
    int crossed = 0, first = 0, last = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      crossed += part[i] < target;
      first += count[i] < until - room;
      last += count[i] <= until + room;
    }
    crossed = __reduce_add_sync(0xffffffffu, crossed);
    first = __reduce_add_sync(0xffffffffu, first);
    last = __reduce_add_sync(0xffffffffu, last);
    first = min(first, max(crossed - 1, 0));
    last = max(last, crossed + 2);
    if (crossed + 1 < kSteps) last = min(last, kSteps - 1);  // the last step has all that is smaller
    Range range{last >= kSteps ? row.limit : key_down(last), first == 0 ? row.top : key_down(first)};
    range.low = min(range.low, range.high);
    return range;
  }

  // The smallest element of the range, which is marked and tallied, that is needed so that it and all above it reach
  // the target; `bucket` is where.
  FI_DEVICE uint32_t narrow(bool weights, Range range, int bucket, uint64_t above, uint64_t target) {
#pragma unroll 1
    for (;;) {
      const int shift = bucket_shift(range);
      const uint32_t low = range.low + (static_cast<uint32_t>(bucket) << shift);
      const Total found = shared.totals[bucket];
      if (shift == 0 || found.count == 1) return low;
      range = {low, low + min(range.high - low, (1u << shift) - 1)};
      if (found.count <= kFew) return send(weights, range, found, above, target);
      tally(weights, range);
      exchange();
      bucket = crossing(weights, above, target);
    }
  }

  // Gives the marked elements of the range to all blocks, each of which settles it.
  FI_DEVICE uint32_t send(bool weights, Range range, Total found, uint64_t above, uint64_t target) {
    row.each_marked([&](float x) {
      const uint32_t key = key_of(x);
      if (key < range.low || key > range.high) return;
      const unsigned at = found.before + atomicAdd(&shared.mine, 1u);
      for (unsigned r = 0; r < Team::size(); ++r) Team::write(shared.entries[at], r, uint64_t{key} << 32);
    });
    Team::sync();
    const int n = static_cast<int>(found.count);
    if (static_cast<int>(threadIdx.x) < n) {
      const uint32_t key = static_cast<uint32_t>(shared.entries[threadIdx.x] >> 32);
      shared.few.elements[threadIdx.x] = {key, part_of(weights, value_of(key))};
    }
    if (threadIdx.x == 0) shared.few.found = range.low;
    __syncthreads();
    return shared.few.settle(n, above, target);
  }

  // Gives all blocks the elements from `bound` on, with their tokens (slots less `first`). Returns their number, and -1
  // if there are too many.
  FI_DEVICE int send_all(uint32_t bound, int first) {
    const unsigned room = kFew / Team::size();
    const float least = value_of(bound);
    row.pieces([&](int base) {
      if (row.peak(base) < bound) return;
      row.template rows<2>(base, [&](const float (&x)[Row::kVec], int j) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < Row::kVec; ++i) bits |= static_cast<uint32_t>(x[i] >= least) << i;
#pragma unroll 1
        for (; bits; bits &= bits - 1) {
          const int further = (32 * j + row.lane()) * Row::kVec + __ffs(static_cast<int>(bits)) - 1;
          const unsigned at = atomicAdd(&shared.mine, 1u);
          if (at >= room) break;
          const uint32_t key = key_of(row.source.at(row.source.place(base), further));
          const uint64_t entry = uint64_t{key} << 32 | static_cast<uint32_t>(base + further - first);
          for (unsigned r = 0; r < Team::size(); ++r) Team::write(shared.entries[Team::rank() * room + at], r, entry);
        }
      });
    });
    __syncthreads();
    if (threadIdx.x < Team::size()) Team::write(shared.sent[Team::rank()], threadIdx.x, shared.mine);
    Team::sync();
    int n = 0, before = 0;
    bool fits = true;
    const unsigned from = threadIdx.x / room, at = threadIdx.x % room;
    for (unsigned r = 0; r < Team::size(); ++r) {
      const unsigned count = shared.sent[r];
      fits &= count <= room;
      if (r < from) before += static_cast<int>(count);
      n += static_cast<int>(count);
    }
    if (threadIdx.x == 0) shared.mine = 0;
    if (!fits) return -1;
    if (from < Team::size() && at < shared.sent[from]) {
      const uint64_t entry = shared.entries[from * room + at];
      shared.few.elements[before + at] = {static_cast<uint32_t>(entry >> 32), 1};
      shared.few.tokens[before + at] = static_cast<uint32_t>(entry);
    }
    __syncthreads();
    return n;
  }

  struct Wanted {
    int vocab;
    int32_t k;
    float top_p;
    bool joint, sums;  // sums: by piece, of what may be drawn
    uint32_t bound;    // of the k-th largest, from below; 0 if there is none
    uint32_t least;    // the smallest key that other conditions allow
  };
  // The smallest key that may be drawn. Where all that may be drawn are few, `listed` is their number, else -1.
  FI_DEVICE uint32_t find(const Wanted& wanted, int first, int& listed) {
    enum Stage { kBound, kCount, kWeight, kSums };
    const bool by_count = wanted.k > 0 && wanted.k < wanted.vocab, by_weight = wanted.top_p < 1.f;
    const uint32_t all = row.limit;
    uint32_t lowest = wanted.least;
    Stage stage = by_count    ? wanted.bound > all && !(wanted.joint && by_weight) ? kBound : kCount
                  : by_weight ? kWeight
                              : kSums;
    Range range{};
    bool fresh = true;  // the stage is
    listed = -1;
#pragma unroll 1
    for (;;) {
      const bool weights = stage >= kWeight;
      if (stage == kBound) {
        listed = send_all(wanted.bound, first);
        if (listed >= 0) return wanted.bound;
        stage = kCount;
      }
      if (fresh) {
        if (stage == kCount || stage == kWeight) range = guess(weights, wanted.k, wanted.top_p, wanted.vocab);
        if (stage == kSums) {
          if (wanted.sums) row.sum_from(lowest);
          return lowest;
        }
      }
      uint64_t above, total, target = wanted.k;
      row.mark(range, weights, weights || (stage == kCount && range.high != row.top), above, total);
      add(kAbove, above);
      add(kAll, total);
      tally(weights, range);
      exchange();
      above = shared.totals[kAbove].sum;
      if (weights) target = share_of(shared.totals[kAll].sum, wanted.top_p);
      fresh = false;
      if (above >= target) {  // the guess was too low
        range = {range.high + 1, row.top};
        continue;
      }
      const int bucket = crossing(weights, above, target);
      if (bucket < 0 && range.low > row.limit) {  // too high
        range = {row.limit, range.low - 1};
        continue;
      }
      const uint32_t key = bucket < 0 ? row.limit : narrow(weights, range, bucket, above, target);
      lowest = max(lowest, key);
      if (stage == kCount && by_weight) {
        if (!wanted.joint) row.limit = key;
        stage = kWeight, fresh = true;
        continue;
      }
      row.limit = all;
      if (!wanted.sums) return lowest;
      if (row.knows(lowest)) {
        row.add_marked(lowest);
        return lowest;
      }
      stage = kSums, fresh = true;
    }
  }
};

}  // namespace sampling
}  // namespace fi
