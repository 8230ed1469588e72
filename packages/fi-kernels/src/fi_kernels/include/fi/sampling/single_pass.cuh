// Draws one token from a row that a cluster reads once, by tile.
#pragma once
#include "fi/sampling/adjust_logits.cuh"
#include "fi/sampling/top_p_rejection.cuh"

namespace fi {
namespace sampling {

// Draws output `output` from row `source` if it has no filter or uses rejection sampling. For a top-k row, and after
// all proposals were rejected, it calls filtered(row, tiles, n, random, lowest), which either draws the token itself
// and returns false, or sets `lowest` to the smallest allowed key, stores the weights from it on in the tiles and
// returns true. `tiles`: shared memory of this CTA for the sums of the row.
template <class T, class Cluster, int kWarps, class Filtered>
FI_DEVICE void sample_row_single_pass(const SampleParams& p, TileSum* tiles, int output, int64_t source,
                                      Filtered&& filtered) {
  __shared__ typename Cluster::TransactionBarrier tile_barrier;
  __shared__ union {
    DrawShared<kWarps, 1> single;
    DrawShared<kWarps, kProposals> proposals;
  } shared;
  __shared__ RejectionShared<Cluster, kWarps> rejection_shared;
  const int n = (p.vocab + kTileSize - 1) / kTileSize, tiles_per_cta = (n + Cluster::size() - 1) / Cluster::size();
  if (threadIdx.x == 0) tile_barrier.init();
  Cluster::arrive_relaxed();
  GlobalRow<T> row{static_cast<const T*>(p.input) + source * p.input_stride, p.vocab, p.logits};
  const int first = Cluster::rank() * tiles_per_cta, last = min(first + tiles_per_cta, n), warp = threadIdx.x / 32;
  const float temperature = at(p.temperature, source);
  const bool greedy = is_greedy(p, temperature), unfiltered = greedy || is_unfiltered(p, source),
             rejection = uses_top_p_rejection(p, source);
  if constexpr (sizeof(T) == 4) {
    if (has_adjustments(p)) row.row = adjust_to_global(p, row.row, first * kTileSize, last * kTileSize, output, source);
  }
  const float factor = row.logits ? logits_scale(0.f, temperature).factor : 1.f;
  float x[GlobalRow<T>::kPerLane];
  int j = first + warp;
  if (j < last) row.load(j * kTileSize, x, rejection);
  const RejectionSampler<T, Cluster, kWarps> rejection_sampler{p, tiles, n, first, last, output, rejection_shared};
  uint64_t random = 0;  // computed while the loads are in flight
  if (rejection) {
    rejection_sampler.generate_randoms(0);
    if (threadIdx.x == 0) rejection_shared.row = row.row, rejection_shared.source = source;
  }
  if (!rejection) random = random_number(p, output, 0);
  Cluster::wait();
  if (threadIdx.x == 0) tile_barrier.expect(n * sizeof(TileSum));
#pragma unroll 1
  while (j < last) {
    uint4 record;
    if (unfiltered || rejection) {
      const uint32_t key = row.max_key(x);
      const uint64_t sum = key ? warp_sum_u64(row.sum_weights(x, key, factor, greedy)) : 0;
      record = make_uint4(static_cast<uint32_t>(sum), static_cast<uint32_t>(sum >> 32), key, 0);
    } else {
      record = make_uint4(row.template max_key<0, 4>(x), row.template max_key<4, 8>(x), row.template max_key<8, 12>(x),
                          row.template max_key<12, 16>(x));
    }
    if (threadIdx.x % 32 == 0) tile_barrier.send(tiles[j], 0, record);
    j += kWarps;
    if (j < last) row.load(j * kTileSize, x, rejection);
  }
  if (has_adjustments(p)) Cluster::sync();  // makes the other CTAs' adjusted logits visible
  if (Cluster::rank() != 0 && !rejection) return;
  if (Cluster::rank() == 0) tile_barrier.wait();
  pdl_launch_dependents();
  if (rejection) {
    if (rejection_sampler.draw(shared.proposals) || Cluster::rank() != 0) return;
    row = rejection_sampler.row(), source = rejection_shared.source;
    random = random_number(p, output, kRounds * kProposals);
  }
  uint32_t lowest = 0;
  if (!unfiltered && !filtered(row, tiles, n, random, lowest)) return;
  const uint32_t max_key = max_tile_key(tiles, n, shared.single.maxima);
  if (max_key == 0) {
    if (threadIdx.x == 0) write_token(p, output, 0, false);
    return;
  }
  const Scale scale = row.scale(max_key, temperature);
  const auto rescale_of = [&](uint32_t key) {
    if (!unfiltered || greedy) return Rescale{key >= (greedy ? max_key : lowest), 0};
    return rescale_of_tile(value_of(key), scale, max_key == kInfinityKey, row.logits);
  };
  rescale_tiles<kWarps>(tiles, n, rescale_of);
  draw_from_tiles<1>(
      row, tiles, n, shared.single, [&](uint64_t total, int) { return greedy ? 0 : uniform_below(total, random); },
      rescale_of,
      [&](uint32_t key) {
        return unfiltered ? row.weight_function(key, factor, greedy)
                          : WeightFunction{scale, value_of(lowest), 0, row.logits};
      },
      [&](int, int token) { write_token(p, output, token, true); });
}

}  // namespace sampling
}  // namespace fi
