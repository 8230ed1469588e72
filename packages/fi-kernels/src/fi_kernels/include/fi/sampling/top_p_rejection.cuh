// Draws from the top-p set by rejection sampling: proposes tokens of the whole row, accepts one whose weight above is
// less than top-p. The second read of the row, for the test, hits L2.
#pragma once
#include "fi/sampling/draw_from_tiles.cuh"

namespace fi {
namespace sampling {

// Shared memory of each CTA of the cluster.
template <class Cluster, int kWarps>
struct RejectionShared {
  // Of each CTA: the weight above each proposed token, and in total.
  uint64_t cta_sums[Cluster::kMaxCtas][kProposals + 1];
  uint64_t warp_sums[kWarps][kProposals + 1];
  uint64_t randoms[kProposals];
  uint32_t keys[kProposals], max_key;  // of the proposed tokens and the row maximum; CTA 0 writes them to all CTAs
  int tokens[kProposals];              // in CTA 0
  const void* row;                     // kept here to save registers
  int64_t source;
};

// Rejection sampling of one row by a cluster. Each warp owns the tiles first + warp, first + warp + kWarps ... below
// `last`.
template <class T, class Cluster, int kWarps>
struct RejectionSampler {
  const SampleParams& p;
  TileSum* tiles;  // in CTA 0
  int n, first, last, output;
  RejectionShared<Cluster, kWarps>& shared;

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }

  FI_DEVICE GlobalRow<T> row() const { return {static_cast<const T*>(shared.row), p.vocab, p.logits}; }
  // Computes the random numbers of a round.
  FI_DEVICE void generate_randoms(int round) const {
    if (threadIdx.x < kProposals)
      shared.randoms[threadIdx.x] = random_number(p, output, round * kProposals + threadIdx.x);
  }
  // Runs the rounds. Returns whether a token was accepted and written; if not, the tile sums are no longer needed.
  FI_DEVICE bool draw(DrawShared<kWarps, kProposals>& draw_shared) const {
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      if (round) generate_randoms(round), __syncthreads();
      if (Cluster::rank() == 0) propose(draw_shared, round);
      Cluster::sync();
      const bool valid = shared.max_key != 0;
      // +inf takes all probability, so its proposal is accepted.
      const int accepted = valid && shared.max_key != kInfinityKey ? verify() : 0;
      if (accepted == kProposals) continue;
      if (Cluster::rank() == 0 && threadIdx.x == 0) write_token(p, output, valid ? shared.tokens[accepted] : 0, valid);
      return true;
    }
    return false;
  }
  // Draws the proposals of a round, in CTA 0, and writes their keys to all CTAs.
  FI_DEVICE void propose(DrawShared<kWarps, kProposals>& draw_shared, int round) const {
    const GlobalRow<T> row = this->row();
    const uint32_t max_key = round ? shared.max_key : max_tile_key(tiles, n, draw_shared.maxima);
    const float temperature = at(p.temperature, shared.source);
    const Scale scale = row.scale(max_key, temperature);
    const float factor = row.logits ? scale.factor : 1.f;
    const auto rescale_of = [&](uint32_t key) {
      return rescale_of_tile(value_of(key), scale, max_key == kInfinityKey, row.logits);
    };
    if (round == 0) rescale_tiles<kWarps>(tiles, n, rescale_of);
    if (max_key != 0)
      draw_from_tiles<kProposals>(
          row, tiles, n, draw_shared, [&](uint64_t total, int g) { return uniform_below(total, shared.randoms[g]); },
          rescale_of, [&](uint32_t key) { return row.weight_function(key, factor, false); },
          [&](int g, int token) { shared.tokens[g] = token, shared.keys[g] = key_of(row.at(token)); });
    __syncthreads();
    if (warp() != 0) return;
    if (lane() < static_cast<int>(Cluster::size())) Cluster::write(shared.max_key, lane(), max_key);
#pragma unroll 1
    for (int i = lane(); i < kProposals * static_cast<int>(Cluster::size()); i += 32)
      Cluster::write(shared.keys[i % kProposals], i / kProposals, shared.keys[i % kProposals]);
  }
  // Adds to `sums` the weight above each proposed token, and the total weight.
  template <int kCount, class WeightOf>
  FI_DEVICE static void add_weights(const float (&x)[kCount], const float (&proposed)[kProposals],
                                    uint64_t (&sums)[kProposals + 1], WeightOf&& weight) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t w = weight(x[k]);
      sums[kProposals] += w;
#pragma unroll
      for (int g = 0; g < kProposals; ++g) sums[g] += x[k] > proposed[g] ? w : 0u;
    }
  }
  // Returns the first accepted proposal of the round, kProposals if none is. All CTAs call it.
  FI_DEVICE int verify() const {
    const GlobalRow<T> row = this->row();
    const Scale scale = row.scale(shared.max_key, at(p.temperature, shared.source));
    uint64_t sums[kProposals + 1] = {};
    float proposed[kProposals];
#pragma unroll
    for (int g = 0; g < kProposals; ++g) proposed[g] = value_of(shared.keys[g]);
    // Half a tile at a time fits into the registers.
    constexpr int kParts = 2, kCount = GlobalRow<T>::kPerLane / kParts;
    const int end = kParts * max(last - first - warp(), 0);
#pragma unroll 1
    for (int i = 0; i < end; i += i % kParts == kParts - 1 ? kParts * kWarps - kParts + 1 : 1) {
      float x[kCount];
      row.template load<kParts>((first + warp() + i / kParts) * kTileSize, x, false, i % kParts);
      if (row.logits)
        add_weights(x, proposed, sums, [&](float x) { return coarse_weight(finite_weight(x, scale)); });
      else
        add_weights(x, proposed, sums, [&](float x) { return coarse_weight(positive_weight(x, scale)); });
    }
#pragma unroll
    for (int g = 0; g <= kProposals; ++g) {
      const uint64_t warp_sum = warp_sum_u64(sums[g]);
      if (lane() == 0) shared.warp_sums[warp()][g] = warp_sum;
    }
    __syncthreads();
    if (warp() <= kProposals) {
      const uint64_t cta_sum = warp_sum_u64(lane() < kWarps ? shared.warp_sums[lane()][warp()] : 0);
      if (lane() < static_cast<int>(Cluster::size()))
        Cluster::write(shared.cta_sums[Cluster::rank()][warp()], lane(), cta_sum);
    }
    Cluster::sync();
    const auto cluster_sum = [&](int g) {
      return warp_sum_u64(lane() < static_cast<int>(Cluster::size()) ? shared.cta_sums[lane()][g] : 0);
    };
    const uint64_t target = top_p_target(cluster_sum(kProposals), at(p.top_p, shared.source));
    int accepted = 0;
#pragma unroll 1
    while (accepted < kProposals && cluster_sum(accepted) >= target) ++accepted;
    return accepted;
  }
};

}  // namespace sampling
}  // namespace fi
