// Samples one row with all CTAs of a cluster: passes over the elements, weight sums, the draw, and output rows.
#pragma once
#include "fi/sampling/row_storage.cuh"
#include "fi/sampling/sampler_shared.cuh"

namespace fi {
namespace sampling {

// `Source` provides the elements: `address(base)` locates a tile, `load(address, offset)` returns kVec of its elements,
// `at(slot)` one; NaN outside the row. Each warp owns the tiles [begin, end).
// Terms: a key is an element's ordered bits (larger key, larger element); a weight is its probability as an integer,
// relative to the row maximum. Tiles of a warp fall into kTileGroups groups; shared memory keeps the maximum and the
// weight sum of each group.
template <class Cluster, class Source, int kWarps>
struct RowSampler {
  static constexpr int kVec = Source::kVec, kVectors = kTileSize / (32 * kVec);
  SamplerShared<Cluster, kWarps>& shared;
  const Source& source;
  float* list;     // this warp's candidates, at most kWarpListCapacity
  int begin, end;  // slots of this warp, a multiple of the tile size
  bool logits;
  Scale scale;
  uint32_t max_key, min_key;  // keys of the row maximum and of the smallest element that has probability
  uint32_t thread_max;        // key of this thread's maximum
  KeyRange candidate_range;   // keys of the collected candidates; group sums are of elements above it
  bool has_sums;
  // Candidates of this warp; lane i: candidates up to the end of the i-th tile of `for_tiles`.
  int candidate_count, tile_ends;

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }

  // Calls f(x, j) for the vectors of a tile: vector j of lane l is at slot base + (32 j + l) kVec. The loop is not
  // unrolled, since instruction fetches also cost; other warps hide the latency.
  template <int kBatch, class F>
  FI_DEVICE void for_vectors(int base, F&& f) const {
    const auto address = source.address(base);
#pragma unroll 1
    for (int j = 0; j < kVectors; j += kBatch) {
      float x[kBatch][kVec];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) to_float(source.load(address, (32 * (j + i) + lane()) * kVec), x[i]);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) f(x[i], j + i);
    }
  }
  // Calls f(base) for each tile of the warp. Every other group of four warps starts in the middle, so that not all
  // warps wait for global memory at once.
  template <class F>
  FI_DEVICE void for_tiles(F&& f) const {
    const int n = (end - begin) / kTileSize;
    int tile = warp() & 4 ? n / 2 : 0;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      f(begin + tile * kTileSize);
      if (++tile == n) tile = 0;
    }
  }
  FI_DEVICE int tile_group(int base) const {
    // Several tiles share a group if there are more than kTileGroups.
    const int shift = max(29 - __clz((end - begin) / kTileSize - 1), 0);
    return (base - begin) / kTileSize >> shift;
  }
  FI_DEVICE uint32_t tile_max(int base) const { return shared.group_max[warp()][tile_group(base)]; }
  FI_DEVICE Weight weight_of(float x) const { return logits ? logit_weight(x, scale) : prob_weight(x, scale); }
  FI_DEVICE uint32_t weight(float x) const { return coarse_weight(weight_of(x)); }
  // Computes the weights of one vector, 0 below `lowest`. The selection comes last: a branch per element is slower.
  FI_DEVICE void weigh(const float (&x)[kVec], float lowest, uint32_t (&w)[kVec]) const {
    if (logits) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[i] = coarse_weight(logit_weight(x[i], scale));
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[i] = coarse_weight(prob_weight(x[i], scale));
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) w[i] = x[i] >= lowest ? w[i] : 0u;
  }

  // Computes the row maximum, each thread's maximum and the scale. `bound` becomes a lower bound of the k-th largest
  // key: each warp takes the `per_warp`-th largest of its threads' maxima, and `bound` is the `warp_count`-th largest
  // of those over the cluster, where per_warp * warp_count >= k. `bound` is 0 if no such key exists or per_warp is 0.
  // Returns false if no element has probability.
  FI_DEVICE bool prepare(float temperature, int per_warp, int warp_count, uint32_t& bound) {
    const float least = logits ? -__uint_as_float(kMaxFiniteBits) : __uint_as_float(kMinPositiveBits);
    const auto key_from = [&](float x) { return x >= least ? key_of(x) : 0u; };
    if (lane() < kTileGroups) shared.group_max[warp()][lane()] = 0;
    __syncwarp();
    uint32_t high = 0;
    thread_max = 0;
    has_sums = false;
    const int n = (end - begin) / kTileSize, in_gap = source.tiles_in_gap();
    // Tiles in global memory come first, while the copies of the others arrive.
    int tile = in_gap ? source.first_tile_in_gap(begin) : 0;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      if (i == in_gap) source.await();
      const int base = begin + tile * kTileSize;
      if (++tile == n) tile = 0;
      float largest = __int_as_float(0x7fffffff);  // NaN
      for_vectors<kVectors>(base, [&](const float (&x)[kVec], int) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) largest = fmaxf(largest, x[i]);
      });
      const uint32_t key = key_from(largest), tile_key = __reduce_max_sync(0xffffffffu, key);
      thread_max = max(thread_max, key);
      high = max(high, tile_key);
      if (lane() == 0) {
        uint32_t& group_key = shared.group_max[warp()][tile_group(base)];
        group_key = max(group_key, tile_key);
      }
    }
    bound = 0;
    uint32_t ranked = 0, rest = thread_max;
#pragma unroll 1
    for (int i = 0; i < per_warp; ++i) {
      ranked = __reduce_max_sync(0xffffffffu, rest);
      if (lane() == __ffs(__ballot_sync(0xffffffffu, rest == ranked)) - 1) rest = 0;
    }
    Cluster::wait();
    broadcast(shared.warp_max, uint64_t{high} << 32 | ranked);
    max_key = 0;
    for_warps(shared.warp_max,
              [&](uint64_t keys, unsigned) { max_key = max(max_key, static_cast<uint32_t>(keys >> 32)); });
    max_key = __reduce_max_sync(0xffffffffu, max_key);
    if (max_key == 0) return false;
    if (per_warp) {
      if (warp() == 0) {
        const uint32_t found = published_lower_bound(warp_count);
        if (lane() == 0) shared.candidates.selected_key = found;
      }
      __syncthreads();
      bound = shared.candidates.selected_key;
    }
    scale = logits ? logits_scale(value_of(max_key), temperature) : probs_scale(value_of(max_key));
    min_key = key_of(scale.lowest);
    return true;
  }

  // Returns the `warp_count`-th largest of the keys that the warps broadcast in `prepare`, or a little less; 0 if fewer
  // exist. One warp calls it.
  FI_DEVICE uint32_t published_lower_bound(int warp_count) const {
    uint32_t high = 0, low = ~0u, nonzero = 0;  // over nonzero keys
    for_warps(shared.warp_max, [&](uint64_t keys, unsigned) {
      const uint32_t key = static_cast<uint32_t>(keys);
      high = max(high, key);
      low = min(low, key - 1);
      nonzero += key != 0;
    });
    if (static_cast<int>(__reduce_add_sync(0xffffffffu, nonzero)) < warp_count) return 0;
    high = __reduce_max_sync(0xffffffffu, high);
    low = __reduce_min_sync(0xffffffffu, low) + 1;
    return kth_largest_lower_bound(warp_count, low, high, [&](uint32_t key) {
      uint32_t count = 0;
      for_warps(shared.warp_max, [&](uint64_t keys, unsigned) { count += static_cast<uint32_t>(keys) >= key; });
      return static_cast<int>(__reduce_add_sync(0xffffffffu, count));
    });
  }

  // Writes this warp's value to all CTAs of the cluster, then waits for the values of all warps.
  using Values = uint64_t[Cluster::kMaxCtas][kWarps];
  FI_DEVICE static void broadcast(Values& values, uint64_t value) {
    if (lane() < static_cast<int>(Cluster::size())) Cluster::write(values[Cluster::rank()][warp()], lane(), value);
    Cluster::sync();
  }
  // Calls f(value, warp) for each warp of the cluster; each lane takes every 32nd warp.
  template <class F>
  FI_DEVICE static void for_warps(const Values& values, F&& f) {
    for (unsigned i = lane(); i < Cluster::size() * kWarps; i += 32) f(values[i / kWarps][i % kWarps], i);
  }

  // Sums the weights of the elements from `key` on, by tile group.
  FI_DEVICE void sum_weights_from(uint32_t key) {
    const float lowest = value_of(key);
    clear_sums();
    has_sums = true;
    candidate_range = {key, key - 1};
    for_tiles([&](int base) {
      if (tile_max(base) < key) return;
      uint64_t part = 0;
      for_vectors<kVectors>(base, [&](const float (&x)[kVec], int) {
        uint32_t w[kVec];
        weigh(x, lowest, w);
#pragma unroll
        for (int i = 0; i < kVec; ++i) part += w[i];
      });
      add_to_group(base, part);
    });
  }
  FI_DEVICE void clear_sums() const {
    __syncwarp();
    if (lane() < kTileGroups) shared.group_sum[warp()][lane()] = 0;
    __syncwarp();
  }
  // Collects the elements of the range as candidates, as far as the list has room. With `count_above`, also adds up
  // elements above the range (`above`, and by tile group) and elements from `min_key` on (`all`): their number, or with
  // `by_weight` their weights.
  FI_DEVICE void collect(KeyRange range, bool by_weight, bool count_above, uint64_t& above, uint64_t& all) {
    const float low = value_of(range.low), upper = value_of(range.high + 1), lowest = value_of(min_key);
    above = all = 0;
    candidate_range = range;
    has_sums = count_above && by_weight;
    candidate_count = tile_ends = 0;
    clear_sums();
    int tile = 0;
    for_tiles([&](int base) {
      if (tile_max(base) >= (count_above ? min_key : range.low)) {
        uint64_t part = 0;
        uint32_t bits = 0;  // bit i: this lane's element i is in the range
        for_vectors<kVectors>(base, [&](const float (&x)[kVec], int j) {
          uint32_t in = 0;
#pragma unroll
          for (int i = 0; i < kVec; ++i) in |= static_cast<uint32_t>(x[i] >= low && !(x[i] >= upper)) << i;
          bits |= in << (j * kVec);
          if (count_above) accumulate(x, by_weight, lowest, upper, part, all);
        });
        const int own = __popc(bits), inclusive = warp_scan(own);
        int at = candidate_count + inclusive - own;
        candidate_count += __shfl_sync(0xffffffffu, inclusive, 31);
#pragma unroll 1
        for (; bits && at < kWarpListCapacity; bits &= bits - 1) {
          const int i = __ffs(static_cast<int>(bits)) - 1;
          list[at++] = source.at(source.address(base), (32 * (i / kVec) + lane()) * kVec + i % kVec);
        }
        above += part;
        if (count_above) add_to_group(base, part);
      }
      if (lane() == tile++) tile_ends = candidate_count;
    });
    __syncwarp();
  }
  // Whether the list holds all candidates; if not, passes over the row find them again.
  FI_DEVICE bool list_is_complete() const {
    return candidate_count <= kWarpListCapacity && end - begin <= 32 * kTileSize;
  }
  FI_DEVICE void accumulate(const float (&x)[kVec], bool by_weight, float lowest, float upper, uint64_t& above,
                            uint64_t& all) const {
    uint32_t w[kVec];
    if (by_weight) {
      weigh(x, lowest, w);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[i] = x[i] >= lowest;
    }
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {  // one instruction adds two 32-bit halves
      all += uint64_t{w[i]} + w[i + 1];
      above += uint64_t{x[i] >= upper ? w[i] : 0u} + (x[i + 1] >= upper ? w[i + 1] : 0u);
    }
  }
  FI_DEVICE void add_to_group(int base, uint64_t part) const {
    const uint64_t sum = warp_sum_u64(part);
    if (lane() == 0) shared.group_sum[warp()][tile_group(base)] += sum;
  }
  // Calls f(x) for each candidate; each lane takes every 32nd.
  template <class F>
  FI_DEVICE void for_each_candidate(F&& f) const {
    const bool from_list = list_is_complete();
    const float low = value_of(candidate_range.low), upper = value_of(candidate_range.high + 1);
    const int n = from_list ? candidate_count : end - begin;
    int base = begin;
#pragma unroll 1
    for (int i = lane(); i < n; i += 32) {
      if (!from_list) base = begin + i / kTileSize * kTileSize;
      const float x = from_list ? list[i] : source.at(source.address(base), begin + i - base);
      if (x >= low && !(x >= upper)) f(x);
    }
  }

  // Whether the group sums plus the candidates give all weights from `key` on.
  FI_DEVICE bool sums_cover(uint32_t key) const {
    return has_sums && key >= candidate_range.low && key <= candidate_range.high + 1;
  }
  // Adds the weights of the candidates from `key` on to the group sums.
  FI_DEVICE void add_candidate_weights(uint32_t key) const {
    const float low = value_of(key), upper = value_of(candidate_range.high + 1);
    const bool from_list = list_is_complete();
    int tile = 0, from = 0;
    for_tiles([&](int base) {
      const int to = from_list ? __shfl_sync(0xffffffffu, tile_ends, tile++) : kTileSize;
      const auto address = source.address(base);
      uint64_t part = 0;
#pragma unroll 1
      for (int i = from + lane(); i < to; i += 32) {
        const float x = from_list ? list[i] : source.at(address, i);
        if (x >= low && !(x >= upper)) part += weight(x);
      }
      if (from_list) from = to;
      add_to_group(base, part);
    });
  }
  // Returns the weight of the row from the group sums; `own` is this warp's weight, `before` that of the warps before
  // it.
  FI_DEVICE uint64_t total_weight(uint64_t& before, uint64_t& own) {
    __syncwarp();
    own = warp_sum_u64(lane() < kTileGroups ? shared.group_sum[warp()][lane()] : 0);
    return scan_warps(before, own);
  }
  // Computes the ratios of one vector: probability over that of the row maximum, 0 below `lowest`; NaN stays NaN.
  FI_DEVICE void ratios(const float (&x)[kVec], float lowest, float (&y)[kVec]) const {
    if (logits) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = logit_ratio(x[i], scale);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = prob_ratio(x[i], scale);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = x[i] >= lowest ? y[i] : 0.f;
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = x[i] != x[i] ? x[i] : y[i];
  }
  // Returns the weight of all elements from `lowest` on, in fine units for the division. Ratios overwrite the cached
  // elements, so that the output pass does not compute them again.
  FI_DEVICE uint64_t total_fine_weight(float lowest) const {
    const uint32_t least = key_of(lowest);
    uint64_t own = 0, before;
    for_tiles([&](int base) {
      if (tile_max(base) < least) return;
      const bool caches_ratios = source.caches_ratios(base);
      for_vectors<1>(base, [&](const float (&x)[kVec], int j) {
        uint64_t w[kVec];
        float y[kVec];
        ratios(x, lowest, y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          w[i] = fine_weight(weight_of(x[i]));
          w[i] = x[i] >= lowest ? w[i] : 0;
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) own += w[i];
        if (caches_ratios) source.store_ratios(base + (32 * j + lane()) * kVec, y);
      });
    });
    return scan_warps(before, warp_sum_u64(own));
  }
  FI_DEVICE uint64_t scan_warps(uint64_t& before, uint64_t own) const {
    broadcast(shared.warp_weight, own);
    uint64_t total = 0;
    before = 0;
    const unsigned me = Cluster::rank() * kWarps + warp();
    for_warps(shared.warp_weight, [&](uint64_t part, unsigned of) {
      total += part;
      if (of < me) before += part;
    });
    before = warp_sum_u64(before);
    return warp_sum_u64(total);
  }

  // Inverts the CDF within this warp: returns the slot at which the running weight from `lowest` on exceeds `target`.
  FI_DEVICE int locate(float lowest, uint64_t target) const {
    const uint64_t sum = lane() < kTileGroups ? shared.group_sum[warp()][lane()] : 0, up_to = warp_scan(sum);
    const int group = __ffs(__ballot_sync(0xffffffffu, up_to > target)) - 1;
    uint64_t passed = __shfl_sync(0xffffffffu, up_to - sum, max(group, 0));
    int found = -1;
#pragma unroll 1
    for (int base = begin; base < end; base += kTileSize) {
      if (tile_group(base) != group || tile_max(base) < key_of(lowest)) continue;
      for_vectors<1>(base, [&](const float (&x)[kVec], int j) {
        if (found >= 0) return;
        uint32_t w[kVec];
        weigh(x, lowest, w);
        uint64_t part = 0;
#pragma unroll
        for (int i = 0; i < kVec; ++i) part += w[i];
        const uint64_t inclusive = passed + warp_scan(part);
        const unsigned reached = __ballot_sync(0xffffffffu, inclusive > target);
        if (reached) {
          uint64_t sum = inclusive - part;
          int at = base + (32 * j + lane()) * kVec;
#pragma unroll
          for (int i = 0; i < kVec - 1; ++i) {
            sum += w[i];
            at += sum <= target;
          }
          found = __shfl_sync(0xffffffffu, at, __ffs(static_cast<int>(reached)) - 1);
        }
        passed = __shfl_sync(0xffffffffu, inclusive, 31);
      });
    }
    return found;
  }

  // Writes an output row, of T or with `float32` of floats: the elements from `lowest` on. With `masked` they and NaN
  // keep their values and the others become -inf; else they become probabilities, relative to the weight `total`.
  // NOTE: one pass for all outputs: with a pass for each, NVRTC 13.0 takes 0.07 s longer, of 1.1 s.
  template <class T>
  FI_DEVICE void write(void* out, bool float32, int first, int last, bool masked, float lowest, uint64_t total) const {
    const float inverse = total ? __fdiv_rn(kFineOne, static_cast<float>(total)) : 0.f;
    const uint32_t least = key_of(lowest);
    constexpr int64_t kBytes = sizeof(T);
    char* slots = static_cast<char*>(out) - first * (float32 ? 4 : kBytes);  // the address of slot 0
    const bool aligned = reinterpret_cast<uint64_t>(slots) % 16 == 0;
#pragma unroll 1
    for (int base = begin; base < end; base += kTileSize) {
      const bool whole = aligned && base >= first && base + kTileSize <= last;
      for_vectors<1>(base, [&](const float (&x)[kVec], int j) {
        float y[kVec];
        if (masked) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) y[i] = x[i] < lowest ? __int_as_float(0xff800000) : x[i];
        } else {
          renormalise(x, lowest, source.caches_ratios(base) && tile_max(base) >= least, inverse, y);
        }
        const int slot = base + (32 * j + lane()) * kVec;
        if (sizeof(T) < 4 && float32)
          write_vector(reinterpret_cast<float*>(slots), slot, whole, first, last, y);
        else
          write_vector(reinterpret_cast<T*>(slots), slot, whole, first, last, y);
      });
    }
  }
  // Computes the probabilities of one vector. are_ratios: x are ratios.
  FI_DEVICE void renormalise(const float (&x)[kVec], float lowest, bool are_ratios, float inverse,
                             float (&y)[kVec]) const {
    if (are_ratios) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = x[i];
    } else {
      ratios(x, lowest, y);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float product = mul_rn(y[i], inverse);
      y[i] = product > 1.f ? 1.f : product;
    }
  }
  // Writes one vector of an output row. whole: all of its slots are in the row, and aligned.
  template <class O>
  FI_DEVICE static void write_vector(O* slots, int slot, bool whole, int first, int last, const float (&y)[kVec]) {
    constexpr int kBatch = kVec * sizeof(O) > 16 ? 16 / sizeof(O) : kVec;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kVec; i += kBatch) {
        float part[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) part[k] = y[i + k];
        Vec<O, kBatch> rounded;
        from_float(part, rounded);
        store(slots + slot + i, rounded);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (slot + i >= first && slot + i < last) slots[slot + i] = from_float<O>(y[i]);
    }
  }
};

}  // namespace sampling
}  // namespace fi
