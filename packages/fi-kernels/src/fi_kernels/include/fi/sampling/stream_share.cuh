// Draws from the elements with a share of a row's weight, without a search for where they end: tokens are drawn from
// all of the row, and a second read, from L2, tells which of them are such elements.
#pragma once
#include "fi/sampling/draw_piece.cuh"

namespace fi {
namespace sampling {

// In each block of a team.
template <class Team, int kWarps>
struct ShareScratch {
  uint64_t sums[Team::kLargest][kDraws + 1];  // of each block: of what is above each token drawn, and of all
  uint64_t parts[kWarps][kDraws + 1];
  uint64_t randoms[kDraws];
  uint32_t keys[kDraws], top;  // of the tokens and of the largest element: the first block gives them to all
  int tokens[kDraws];          // in the first block
  const void* row;             // what need not be in registers
  int64_t source;
};

// A team's draw from its row; each warp has pieces j, j + kWarps and on below `last`.
template <class T, class Team, int kWarps>
struct ShareOfRow {
  const SampleParams& p;
  PieceSum* pieces;  // in the first block
  int n, first, last, output;
  ShareScratch<Team, kWarps>& share;

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }

  FI_DEVICE StreamedRow<T> row() const { return {static_cast<const T*>(share.row), p.vocab, p.logits}; }
  // The random numbers of a turn.
  FI_DEVICE void randomise(int turn) const {
    if (threadIdx.x < kDraws) share.randoms[threadIdx.x] = random_number(p, output, turn * kDraws + threadIdx.x);
  }
  // Whether the output was written. If not, the pieces' sums are of no use any more.
  FI_DEVICE bool draw(DrawScratch<kWarps, kDraws>& shared) const {
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn) randomise(turn), __syncthreads();
      if (Team::rank() == 0) propose(shared, turn);
      Team::sync();
      const bool valid = share.top != 0;
      const int taken = valid && share.top != kInfinityKey ? verify() : 0;  // +inf has all of the weight
      if (taken == kDraws) continue;
      if (Team::rank() == 0 && threadIdx.x == 0) put_token(p, output, valid ? share.tokens[taken] : 0, valid);
      return true;
    }
    return false;
  }
  // By the first block.
  FI_DEVICE void propose(DrawScratch<kWarps, kDraws>& shared, int turn) const {
    const StreamedRow<T> row = this->row();
    const uint32_t top = turn ? share.top : largest_key(pieces, n, shared.maxima);
    const float temperature = at(p.temperature, share.source);
    const Scale scale = row.scale(top, temperature);
    const float factor = row.logits ? scale.factor : 1.f;
    const auto portion = [&](uint32_t key) {
      return portion_of(value_of(key), scale, top == kInfinityKey, row.logits);
    };
    if (turn == 0) scale_pieces<kWarps>(pieces, n, portion);
    if (top != 0)
      draw_from_pieces<kDraws>(
          row, pieces, n, shared, [&](uint64_t total, int g) { return uniform_below(total, share.randoms[g]); },
          portion, [&](uint32_t key) { return row.weigher(key, factor, false); },
          [&](int g, int token) { share.tokens[g] = token, share.keys[g] = key_of(row.at(token)); });
    __syncthreads();
    if (warp() != 0) return;
    if (lane() < static_cast<int>(Team::size())) Team::write(share.top, lane(), top);
#pragma unroll 1
    for (int i = lane(); i < kDraws * static_cast<int>(Team::size()); i += 32)
      Team::write(share.keys[i % kDraws], i / kDraws, share.keys[i % kDraws]);
  }
  // Weights of elements above each token, and of all.
  template <int kCount, class WeightOf>
  FI_DEVICE static void add(const float (&x)[kCount], const float (&least)[kDraws], uint64_t (&sums)[kDraws + 1],
                            WeightOf&& weight) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t w = weight(x[k]);
      sums[kDraws] += w;
#pragma unroll
      for (int g = 0; g < kDraws; ++g) sums[g] += x[k] > least[g] ? w : 0u;
    }
  }
  // By all blocks. The first of the turn's tokens that is taken; kDraws if none is.
  FI_DEVICE int verify() const {
    const StreamedRow<T> row = this->row();
    const Scale scale = row.scale(share.top, at(p.temperature, share.source));
    uint64_t sums[kDraws + 1] = {};
    float least[kDraws];
#pragma unroll
    for (int g = 0; g < kDraws; ++g) least[g] = value_of(share.keys[g]);
    constexpr int kParts = 2, kCount = StreamedRow<T>::kEach / kParts;  // what registers hold
    const int end = kParts * max(last - first - warp(), 0);
#pragma unroll 1
    for (int i = 0; i < end; i += i % kParts == kParts - 1 ? kParts * kWarps - kParts + 1 : 1) {
      float x[kCount];
      row.template load<kParts>((first + warp() + i / kParts) * kPiece, x, false, i % kParts);
      if (row.logits)
        add(x, least, sums, [&](float x) { return coarse(finite_weight(x, scale)); });
      else
        add(x, least, sums, [&](float x) { return coarse(positive_weight(x, scale)); });
    }
#pragma unroll
    for (int g = 0; g <= kDraws; ++g) {
      const uint64_t of_warp = warp_sum_u64(sums[g]);
      if (lane() == 0) share.parts[warp()][g] = of_warp;
    }
    __syncthreads();
    if (warp() <= kDraws) {
      const uint64_t of_block = warp_sum_u64(lane() < kWarps ? share.parts[lane()][warp()] : 0);
      if (lane() < static_cast<int>(Team::size())) Team::write(share.sums[Team::rank()][warp()], lane(), of_block);
    }
    Team::sync();
    const auto of_team = [&](int g) {
      return warp_sum_u64(lane() < static_cast<int>(Team::size()) ? share.sums[lane()][g] : 0);
    };
    const uint64_t target = share_of(of_team(kDraws), at(p.top_p, share.source));
    int taken = 0;
#pragma unroll 1
    while (taken < kDraws && of_team(taken) >= target) ++taken;
    return taken;
  }
};

}  // namespace sampling
}  // namespace fi
