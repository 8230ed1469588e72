// Samples one row per CTA on sm_80 and later: filters it, then draws with one random number, renormalises or masks.
#pragma once
#include "fi/sampling/single_pass.cuh"
#include "fi/sampling/threshold_search.cuh"
#include "fi/sampling/top_k_sampler.cuh"

namespace fi {
namespace sampling {

// Computes output `output` from row `row`. Slots [first, last) relative to this CTA are the row; they may extend beyond
// the CTA. draws: whether the output is a token; a constant leaves out the code of the other outputs.
template <class T, class Cluster, class Source, int kWarps>
FI_DEVICE void sample_row(const SampleParams& p, SamplerShared<Cluster, kWarps>& shared, const Source& source,
                          float* list, int begin, int end, int first, int last, int output, int row, bool draws) {
  using Row = RowSampler<Cluster, Source, kWarps>;
  Row s{shared, source, list, begin, end, p.logits};
  const float temperature = at(p.temperature, row), top_p = at(p.top_p, row);
  const int32_t k = at(p.top_k, row);
  const bool greedy = draws && is_greedy(p, temperature);
  // Number of largest elements that each warp contributes to the lower bound of the k-th largest. Most warps have that
  // many elements above the bound.
  const int warps = Cluster::size() * kWarps;
  int per_warp = k > 0 && k < p.vocab && !greedy ? (4 * min(k, 1 << 20) + 3 * warps - 1) / (3 * warps) : 0;
  if (per_warp > 8) per_warp = 0;
  uint32_t bound = 0;
  const bool valid = s.prepare(temperature, per_warp, per_warp ? (k + per_warp - 1) / per_warp : 0, bound);
  float lowest = __int_as_float(0x7f800000);
  uint64_t before = 0, own = 0, total = 0;
  int candidate_count = -1;
  if (valid) {
    const uint32_t least = greedy ? s.max_key : key_of(min_p_bound(s.scale, at(p.min_p, row), s.logits));
    ThresholdSearch<Cluster, Source, kWarps> t(s);
    uint32_t key = least;
    if (draws || k > 0 || top_p < 1.f)
      key =
          t.find({p.vocab, greedy ? 0 : k, greedy ? 1.f : top_p, p.joint, draws, bound, least}, first, candidate_count);
    if (candidate_count >= 0) {
      const auto selection = shared.candidates.template filter<kWarps * 32>(candidate_count, k, top_p, least,
                                                                            [&](float x) { return s.weight(x); });
      key = selection.key;
      if (draws) {
        const int token = shared.candidates.draw(candidate_count, key, uniform_below(selection.total, shared.random));
        // Several threads write the same value.
        if (token >= 0 && Cluster::rank() == 0) write_token(p, output, token, true);
      }
    }
    lowest = value_of(key);
  }
  pdl_launch_dependents();
  if (draws) {
    if (!valid && Cluster::rank() == 0 && threadIdx.x == 0) write_token(p, output, 0, false);
    if (valid && candidate_count < 0) {
      total = s.total_weight(before, own);
      const uint64_t target = greedy ? 0 : uniform_below(total, shared.random);
      if (target >= before && target < before + own) {
        const int token = s.locate(lowest, target - before) - first;
        if (s.lane() == 0) write_token(p, output, token, true);
      }
    }
    return;
  }
  const bool masked = p.output != kRenormalise, float32 = !masked && p.float32_out;
  if (valid && !masked) total = s.total_fine_weight(lowest);
  constexpr int64_t kBytes = sizeof(T);
  char* out = static_cast<char*>(p.out) + output * p.out_stride * (float32 ? 4 : kBytes);
  s.template write<T>(out, float32, first, last, masked, lowest, total);
}

// Writes "no token" for an output whose row index is out of range or whose temperature is NaN. Returns whether it did.
FI_DEVICE bool skip_undrawable(const SampleParams& p, int64_t output, int64_t row) {
  if (is_drawable(p, row)) return false;
  if (threadIdx.x == 0) write_token(p, output, 0, false);
  return true;
}

// The candidate list of a warp, at the beginning of dynamic shared memory.
FI_DEVICE float* warp_list(int warp) {
  extern __shared__ uint4 dynamic[];
  return reinterpret_cast<float*>(dynamic) + warp * kWarpListCapacity;
}

// The tile sums of a single-pass row, which take the place of the candidate lists.
template <class T>
FI_DEVICE TileSum* tile_sums() {
  return reinterpret_cast<TileSum*>(warp_list(0));
}

}  // namespace sampling

// Draws a token from one row per CTA, or rewrites the row. Each pass reads the row from global memory, mostly from L2.
template <class T, int kThreads, bool kDraws>
FI_DEVICE void sample_cta(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  __shared__ SamplerShared<SingleCta, kWarps> shared;
  const int warp = threadIdx.x / 32;
  clear(shared);
  pdl_wait();
  const int output = blockIdx.x;
  const int64_t row = input_row(p, output);
  if (skip_undrawable(p, output, row)) return;
  if constexpr (kDraws) {
    if (is_unfiltered(p, row) || uses_top_p_rejection(p, row)) {
      __shared__ TopKSamplerShared<kWarps> top_k_shared;
      return sample_row_single_pass<T, SingleCta, kWarps>(
          p, tile_sums<T>(), output, row,
          [&](const GlobalRow<T>& global, TileSum* tiles, int n, uint64_t, uint32_t& lowest) {
            lowest = TopKSampler<T, kWarps>{p, global, tiles, n, {}, top_k_shared}.find_threshold(row);
            return true;
          });
    }
  }
  AlignedRow<T> slots(static_cast<const T*>(p.input) + row * p.input_stride, p.vocab);
  if constexpr (sizeof(T) == 4) {
    if (p.adjusted) {
      const float* adjusted = adjust_to_global(p, slots.base + slots.first, 0, p.vocab, output, row);
      slots = AlignedRow<T>(adjusted, p.vocab);
    }
  }
  const int used = slots_per_warp(slots.last, 1), begin = min(warp * p.warp_slots, used),
            end = min(begin + p.warp_slots, used);
  // Only the first and the last tile, which may be partial, are cached in shared memory.
  const int gap_begin = begin == 0 ? kTileSize : begin, gap_end = max(gap_begin, end == used ? end - kTileSize : end);
  const CachedRow<T> source{reinterpret_cast<T*>(warp_list(kWarps)) + kTileSize - gap_begin, gap_begin, gap_end, slots};
  source.fill(begin, min(gap_begin, end));
  source.fill(gap_end, end);
  __syncwarp();
  if (threadIdx.x == 0) shared.random = random_u64(row_random(p, output));
  sample_row<T, SingleCta, CachedRow<T>, kWarps>(p, shared, source, warp_list(warp), begin, end, slots.first,
                                                 slots.last, output, static_cast<int>(row), kDraws);
}

}  // namespace fi
