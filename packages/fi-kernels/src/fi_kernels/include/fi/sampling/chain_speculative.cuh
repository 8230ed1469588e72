// chain_speculative on sm_80 and later: one block a request; acceptance needs single elements, the draw one or two
// rows.
#pragma once
#include "fi/sampling/chain_speculative.h"
#include "fi/sampling/row_sampler.cuh"

namespace fi {
namespace sampling {

// What the target has more than the draft; the target alone where there is no draft.
struct ResidualRow {
  static constexpr int kVec = 4;
  Slots<float> target;
  const float* draft;  // of slot 0

  FI_DEVICE float at(int slot) const {
    if (slot < target.first || slot >= target.last) return __int_as_float(0x7fffffff);
    return draft ? target.base[slot] - draft[slot] : target.base[slot];
  }
  FI_DEVICE int pieces_in_gap() const { return 0; }
  FI_DEVICE int first_in_gap(int) const { return 0; }
  FI_DEVICE void await() const {}
  FI_DEVICE int place(int slot) const { return slot; }
  FI_DEVICE float at(int place, int further) const { return at(place + further); }
  FI_DEVICE Vec<float, kVec> load(int place, int further) const {
    const int slot = place + further;
    Vec<float, kVec> x;
    if (target.inside(slot)) {
      x = fi::load<float, kVec>(target.base + slot);
      if (draft) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x.v[i] -= draft[slot + i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) x.v[i] = at(slot + i);
    }
    return x;
  }
};

}  // namespace sampling

template <int kThreads>
FI_DEVICE void chain_speculative(const ChainParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  __shared__ Scratch<OneBlock, kWarps> shared;
  const int64_t row = blockIdx.x;
  clear(shared);
  pdl_wait();
  // Every warp finds the same: 32 positions at a time.
  int position = p.drafts, accepted = 0;
  for (int first = 0; first < p.drafts; first += 32) {
    const int i = first + threadIdx.x % 32;
    const unsigned yes = __ballot_sync(0xffffffffu, i < p.drafts && accepts(p, row, i));
    const int here = min(32, p.drafts - first);
    const unsigned no = ~yes & (here == 32 ? ~0u : (1u << here) - 1);
    if (no && position == p.drafts) position = first + __ffs(no) - 1;
    accepted += __popc(yes);
  }
  const float* target = p.target + (row * (p.drafts + 1) + position) * p.vocab;
  ResidualRow source{Slots<float>(target, p.vocab), nullptr};
  if (position < p.drafts) source.draft = p.draft + (row * p.drafts + position) * p.vocab - source.target.first;
  const int share = warp_share(source.target.last, kWarps), all = warp_share(source.target.last, 1);
  const int begin = min(static_cast<int>(threadIdx.x / 32) * share, all), end = min(begin + share, all);
  RowSampler<OneBlock, ResidualRow, kWarps> s{shared, source, nullptr, begin, end, false};
  uint32_t bound;
  bool valid = s.prepare(1.f, 0, 0, bound);
  if (!valid && source.draft) {  // nothing is left over: both are the same
    __syncthreads();
    source.draft = nullptr;
    valid = s.prepare(1.f, 0, 0, bound);
  }
  uint64_t before = 0, own = 0, total = 0;
  if (valid) {
    s.sum_from(s.limit);
    total = s.total_weight(before, own);
  }
  pdl_launch_dependents();
  int32_t* tokens = p.tokens + row * (p.drafts + 1);
  for (int i = threadIdx.x; i <= p.drafts; i += kThreads)
    if (i != position || !total) tokens[i] = i < position ? p.draft_tokens[row * p.drafts + i] : -1;
  const uint64_t wanted = uniform_below(total, random_of(chain_random(p, row, p.drafts)));
  if (total && wanted >= before && wanted < before + own) {
    const int slot = s.locate(s.scale.lowest, wanted - before);
    if (threadIdx.x % 32 == 0) tokens[position] = slot - source.target.first;
  }
  if (threadIdx.x == 0) {
    p.emitted[row] += position;
    p.accepted[row] += accepted;
  }
}

}  // namespace fi
