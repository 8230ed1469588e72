// sample on sm_80 and later: filter, then draw with one random number a row; here in the form of one block a row.
#pragma once
#include "fi/sampling/adjust.cuh"
#include "fi/sampling/row_sampler.cuh"

namespace fi {
namespace sampling {

// One output of `row`, whose slot `first` is the first of the vocabulary; slots [first, last) lie in the team, and
// slot 0 of this block is slot `base` of the row.
template <class T, class Team, class Source, int kWarps>
FI_DEVICE void run_row(const SampleParams& p, Scratch<Team, kWarps>& shared, const Source& source, int begin, int end,
                       int first, int last, int64_t output, int64_t row, uint64_t random) {
  RowSampler<Team, Source, kWarps> s{shared, source, begin, end, p.logits};
  const float temperature = at(p.temperature, row);
  const bool greedy = is_greedy(p, temperature);
  Range groups;
  const bool valid = s.prepare(temperature, groups);
  float lowest = __int_as_float(0x7f800000);
  uint64_t before = 0, own = 0, total = 0;
  if (valid) {
    lowest =
        greedy ? value_of(s.top)
               : value_of(s.threshold(groups, p.vocab, at(p.top_k, row), at(p.top_p, row), at(p.min_p, row), p.joint));
    if (p.output == kDrawToken) total = s.template total_weight<false>(lowest, before, own);
    if (p.output == kRenormalise) total = s.template total_weight<true>(lowest, before, own);
  }
  pdl_launch_dependents();
  if (p.output == kDrawToken) {
    const bool drawn = total > 0;
    const uint64_t target = greedy ? 0 : uniform_below(total, random);
    int64_t token = 0;
    bool mine = !drawn && Team::rank() == 0 && threadIdx.x < 32;
    if (drawn && target >= before && target < before + own) {
      token = s.locate(lowest, target - before) - first;
      mine = true;
    }
    if (mine && threadIdx.x % 32 == 0) {
      if (p.wide_tokens)
        static_cast<int64_t*>(p.out)[output] = token;
      else
        static_cast<int32_t*>(p.out)[output] = static_cast<int32_t>(token);
      if (p.valid) p.valid[output] = drawn;
    }
  } else if (p.output == kRenormalise) {
    if (p.wide_out)
      s.write_renormalised(static_cast<float*>(p.out) + output * p.out_row, first, last, lowest, total);
    else
      s.write_renormalised(static_cast<T*>(p.out) + output * p.out_row, first, last, lowest, total);
  } else {
    s.write(static_cast<T*>(p.out) + output * p.out_row, first, last,
            [&](float x) { return x >= lowest || x != x ? x : __int_as_float(0xff800000); });
  }
}

// What an output of a row that is not there gets: no token.
FI_DEVICE bool missing(const SampleParams& p, int64_t output, int64_t row) {
  if (row >= 0 && row < p.input_rows) return false;
  if (threadIdx.x == 0) {
    if (p.wide_tokens)
      static_cast<int64_t*>(p.out)[output] = 0;
    else
      static_cast<int32_t*>(p.out)[output] = 0;
    if (p.valid) p.valid[output] = 0;
  }
  return true;
}

// Whole pieces for each of the warps of a block.
FI_DEVICE int warp_share(int slots, int warps) {
  const int each = (slots + warps - 1) / warps;
  return (each + kPiece - 1) / kPiece * kPiece;
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
  const int64_t output = blockIdx.x, row = source_row(p, output);
  if (missing(p, output, row)) return;
  Slots<T> slots(static_cast<const T*>(p.input) + row * p.input_row, p.vocab);
  if constexpr (sizeof(T) == 4) {
    if (p.adjusted) {
      adjust_in_global(p, slots.base + slots.first, output, row);
      slots = Slots<T>(p.adjusted + output * p.adjusted_row, p.vocab);
    }
  }
  const GlobalRow<T> source{slots};
  const int share = warp_share(slots.last, kWarps), all = warp_share(slots.last, 1);
  const int begin = min(warp * share, all), end = min(begin + share, all);
  run_row<T, OneBlock, GlobalRow<T>, kWarps>(p, shared, source, begin, end, slots.first, slots.last, output, row,
                                             random_of(row_random(p, output)));
}

}  // namespace fi
