// One row that is streamed.
#pragma once
#include "fi/sampling/adjust.cuh"
#include "fi/sampling/stream_share.cuh"

namespace fi {
namespace sampling {

// One output: of a row without filters, or of a share of one; or of one that filtered(row, pieces, n, random, lowest)
// draws from, given the keys of its quarters. Or it returns true, `lowest` is the smallest key that may be drawn, and
// the pieces have their weights; as it does for a share that the draws have missed. `pieces`: room in this block's
// shared memory for those of the row.
template <class T, class Team, int kWarps, class Filtered>
FI_DEVICE void stream_row(const SampleParams& p, PieceSum* pieces, int output, int64_t source, Filtered&& filtered) {
  __shared__ typename Team::Gathering gathering;
  __shared__ union {
    DrawScratch<kWarps, 1> one;
    DrawScratch<kWarps, kDraws> some;
  } shared;
  __shared__ ShareScratch<Team, kWarps> share_scratch;
  const int n = (p.vocab + kPiece - 1) / kPiece, each = (n + Team::size() - 1) / Team::size();
  if (threadIdx.x == 0) gathering.begin(n * sizeof(PieceSum));
  Team::appear();
  StreamedRow<T> row{static_cast<const T*>(p.input) + source * p.input_row, p.vocab, p.logits};
  const int first = Team::rank() * each, last = min(first + each, n), warp = threadIdx.x / 32;
  const float temperature = at(p.temperature, source);
  const bool greedy = is_greedy(p, temperature), plain = greedy || is_plain(p, source), share = is_share(p, source);
  if constexpr (sizeof(T) == 4) {
    if (is_adjusted(p)) row.row = adjust_in_global(p, row.row, first * kPiece, last * kPiece, output, source);
  }
  const float factor = row.logits ? logits_scale(0.f, temperature).factor : 1.f;
  float x[StreamedRow<T>::kEach];
  int j = first + warp;
  if (j < last) row.load(j * kPiece, x, share);
  const ShareOfRow<T, Team, kWarps> of_share{p, pieces, n, first, last, output, share_scratch};
  uint64_t random = 0;  // while the row is on its way
  if (share) {
    of_share.randomise(0);
    if (threadIdx.x == 0) share_scratch.row = row.row, share_scratch.source = source;
  }
  if (!share) random = random_number(p, output, 0);
  Team::meet();
#pragma unroll 1
  while (j < last) {
    uint4 known;
    if (plain || share) {
      const uint32_t key = row.largest(x);
      const uint64_t sum = key ? warp_sum_u64(row.weigh(x, key, factor, greedy)) : 0;
      known = make_uint4(static_cast<uint32_t>(sum), static_cast<uint32_t>(sum >> 32), key, 0);
    } else {
      known = make_uint4(row.template largest<0, 4>(x), row.template largest<4, 8>(x), row.template largest<8, 12>(x),
                         row.template largest<12, 16>(x));
    }
    if (threadIdx.x % 32 == 0) gathering.give(pieces[j], 0, known);
    j += kWarps;
    if (j < last) row.load(j * kPiece, x, share);
  }
  if (is_adjusted(p)) Team::sync();  // what other blocks wrote to global memory is there
  if (Team::rank() != 0 && !share) return;
  if (Team::rank() == 0) gathering.await();
  pdl_launch_dependents();
  if (share) {
    if (of_share.draw(shared.some) || Team::rank() != 0) return;
    row = of_share.row(), source = share_scratch.source;
    random = random_number(p, output, kTurns * kDraws);
  }
  uint32_t lowest = 0;
  if (!plain && !filtered(row, pieces, n, random, lowest)) return;
  const uint32_t top = largest_key(pieces, n, shared.one.maxima);
  if (top == 0) {
    if (threadIdx.x == 0) put_token(p, output, 0, false);
    return;
  }
  const Scale scale = row.scale(top, temperature);
  const auto portion = [&](uint32_t key) {
    if (!plain || greedy) return Portion{key >= (greedy ? top : lowest), 0};
    return portion_of(value_of(key), scale, top == kInfinityKey, row.logits);
  };
  scale_pieces<kWarps>(pieces, n, portion);
  draw_from_pieces<1>(
      row, pieces, n, shared.one, [&](uint64_t total, int) { return greedy ? 0 : uniform_below(total, random); },
      portion,
      [&](uint32_t key) {
        return plain ? row.weigher(key, factor, greedy) : Weigher{scale, value_of(lowest), 0, row.logits};
      },
      [&](int, int token) { put_token(p, output, token, true); });
}

}  // namespace sampling
}  // namespace fi
