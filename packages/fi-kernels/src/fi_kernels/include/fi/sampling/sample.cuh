// sample on sm_80 and later: filter, then draw with one random number a row; here in the form of one block a row.
#pragma once
#include "fi/sampling/stream_few.cuh"
#include "fi/sampling/stream_row.cuh"
#include "fi/sampling/threshold.cuh"

namespace fi {
namespace sampling {

// One output of `row`; slots [first, last) of this block are the row, as far as they lie in the block.
template <class T, class Team, class Source, int kWarps>
FI_DEVICE void run_row(const SampleParams& p, Scratch<Team, kWarps>& shared, const Source& source, float* list,
                       int begin, int end, int first, int last, int output, int row) {
  using Row = RowSampler<Team, Source, kWarps>;
  Row s{shared, source, list, begin, end, p.logits};
  const float temperature = at(p.temperature, row), top_p = at(p.top_p, row);
  const int32_t k = at(p.top_k, row);
  const bool greedy = is_greedy(p, temperature), draws = p.output == kDrawToken;
  // Largest elements that each warp contributes to a bound of the k-th largest: most warps have as many above it.
  const int warps = Team::size() * kWarps;
  int rank = k > 0 && k < p.vocab && !greedy ? (4 * min(k, 1 << 20) + 3 * warps - 1) / (3 * warps) : 0;
  if (rank > 8) rank = 0;
  uint32_t bound = 0;
  const bool valid = s.prepare(temperature, rank, rank ? (k + rank - 1) / rank : 0, bound);
  float lowest = __int_as_float(0x7f800000);
  uint64_t before = 0, own = 0, total = 0;
  int listed = -1;
  if (valid) {
    const uint32_t least = greedy ? s.top : key_of(min_p_bound(s.scale, at(p.min_p, row), s.logits));
    Threshold<Team, Source, kWarps> t(s);
    uint32_t key = least;
    if (draws || k > 0 || top_p < 1.f)
      key = t.find({p.vocab, greedy ? 0 : k, greedy ? 1.f : top_p, p.joint, draws, bound, least}, first, listed);
    if (listed >= 0) {
      const auto chosen =
          shared.few.template choose<kWarps * 32>(listed, k, top_p, least, [&](float x) { return s.weight(x); });
      key = chosen.key;
      if (draws) {
        const int token = shared.few.draw(listed, key, uniform_below(chosen.total, shared.random));
        if (token >= 0 && Team::rank() == 0) put_token(p, output, token, true);  // some threads, all the same
      }
    }
    lowest = value_of(key);
  }
  pdl_launch_dependents();
  if (draws) {
    if (!valid && Team::rank() == 0 && threadIdx.x == 0) put_token(p, output, 0, false);
    if (valid && listed < 0) {
      total = s.total_weight(before, own);
      const uint64_t target = greedy ? 0 : uniform_below(total, shared.random);
      if (target >= before && target < before + own) {
        const int token = s.locate(lowest, target - before) - first;
        if (s.lane() == 0) put_token(p, output, token, true);
      }
    }
    return;
  }
  if (p.output == kRenormalise) {
    if (valid) total = s.total_fine(lowest);
    if (sizeof(T) < 4 && p.wide_out)
      s.write_renormalised(static_cast<float*>(p.out) + int64_t{output} * p.out_row, first, last, lowest, total);
    else
      s.write_renormalised(static_cast<T*>(p.out) + int64_t{output} * p.out_row, first, last, lowest, total);
  } else {
    s.write_masked(static_cast<T*>(p.out) + int64_t{output} * p.out_row, first, last, lowest);
  }
}

// What an output of a row gets that is not there or has no temperature: no token.
FI_DEVICE bool missing(const SampleParams& p, int64_t output, int64_t row) {
  if (is_drawable(p, row)) return false;
  if (threadIdx.x == 0) put_token(p, output, 0, false);
  return true;
}

// Of a warp, at the beginning of the dynamic shared memory: room for what it lists.
FI_DEVICE float* list_of(int warp) {
  extern __shared__ uint4 dynamic[];
  return reinterpret_cast<float*>(dynamic) + warp * kListed;
}

// For rows that are not held, in the same place.
template <class T>
FI_DEVICE PieceSum* pieces_of() {
  return reinterpret_cast<PieceSum*>(list_of(0));
}

}  // namespace sampling

// One block a row, which is read from global memory (mostly L2) in each pass.
template <class T, int kThreads>
FI_DEVICE void sample_block(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  __shared__ Scratch<OneBlock, kWarps> shared;
  const int warp = threadIdx.x / 32;
  clear(shared);
  pdl_wait();
  const int output = blockIdx.x;
  const int64_t row = source_row(p, output);
  if (missing(p, output, row)) return;
  if (is_plain(p, row) || is_share(p, row)) {
    __shared__ FewScratch<kWarps> few;
    return stream_row<T, OneBlock, kWarps>(
        p, pieces_of<T>(), output, row,
        [&](const StreamedRow<T>& streamed, PieceSum* pieces, int n, uint64_t, uint32_t& lowest) {
          lowest = FewOfRow<T, kWarps>{p, streamed, pieces, n, {}, few}.find(row);
          return true;
        });
  }
  Slots<T> slots(static_cast<const T*>(p.input) + row * p.input_row, p.vocab);
  if constexpr (sizeof(T) == 4) {
    if (p.adjusted) {
      const float* changed = adjust_in_global(p, slots.base + slots.first, 0, p.vocab, output, row);
      slots = Slots<T>(changed, p.vocab);
    }
  }
  const int all = warp_share(slots.last, 1), begin = min(warp * p.share, all), end = min(begin + p.share, all);
  // The first and the last piece of the row are held: they may not be whole.
  const int gap_begin = begin == 0 ? kPiece : begin, gap_end = max(gap_begin, end == all ? end - kPiece : end);
  const PlacedRow<T> source{reinterpret_cast<T*>(list_of(kWarps)) + kPiece - gap_begin, gap_begin, gap_end, slots};
  source.fill(begin, min(gap_begin, end));
  source.fill(gap_end, end);
  __syncwarp();
  if (threadIdx.x == 0) shared.random = random_of(row_random(p, output));
  run_row<T, OneBlock, PlacedRow<T>, kWarps>(p, shared, source, list_of(warp), begin, end, slots.first, slots.last,
                                             output, static_cast<int>(row));
}

}  // namespace fi
