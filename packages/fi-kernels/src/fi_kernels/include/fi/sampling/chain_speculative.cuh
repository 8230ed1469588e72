// Verifies a chain of draft tokens on sm_80 and later, one CTA per request: tests acceptance, then draws the next
// token.
#pragma once
#include "fi/sampling/chain_speculative.h"
#include "fi/sampling/row_sampler.cuh"

namespace fi {
namespace sampling {

// The residual distribution `target - draft` of one position, or `target` alone where `draft` is null. Negative
// differences get no weight.
struct ResidualRow {
  static constexpr int kVec = 4;
  AlignedRow<float> target;
  const float* draft;  // the element of slot 0, or null

  FI_DEVICE float at(int slot) const {
    if (slot < target.first || slot >= target.last) return __int_as_float(0x7fffffff);
    return draft ? target.base[slot] - draft[slot] : target.base[slot];
  }
  FI_DEVICE int tiles_in_gap() const { return 0; }
  FI_DEVICE int first_tile_in_gap(int) const { return 0; }
  FI_DEVICE void await() const {}
  FI_DEVICE int address(int slot) const { return slot; }
  FI_DEVICE float at(int address, int offset) const { return at(address + offset); }
  FI_DEVICE Vec<float, kVec> load(int address, int offset) const {
    const int slot = address + offset;
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
  __shared__ SamplerShared<SingleCta, kWarps> shared;
  const int64_t row = blockIdx.x;
  clear(shared);
  pdl_wait();
  // Each warp tests 32 draft tokens at a time, and all warps compute the same result.
  int position = p.drafts, accepted = 0;
  for (int first = 0; first < p.drafts; first += 32) {
    const int i = first + threadIdx.x % 32;
    const unsigned accepted_mask = __ballot_sync(0xffffffffu, i < p.drafts && accepts(p, row, i));
    const int tested = min(32, p.drafts - first);
    const unsigned rejected_mask = ~accepted_mask & (tested == 32 ? ~0u : (1u << tested) - 1);
    if (rejected_mask && position == p.drafts) position = first + __ffs(rejected_mask) - 1;
    accepted += __popc(accepted_mask);
  }
  const float* target = p.target + (row * (p.drafts + 1) + position) * p.vocab;
  ResidualRow source{AlignedRow<float>(target, p.vocab), nullptr};
  if (position < p.drafts) source.draft = p.draft + (row * p.drafts + position) * p.vocab - source.target.first;
  const int warp_slots = slots_per_warp(source.target.last, kWarps), all_slots = slots_per_warp(source.target.last, 1);
  const int begin = min(static_cast<int>(threadIdx.x / 32) * warp_slots, all_slots),
            end = min(begin + warp_slots, all_slots);
  RowSampler<SingleCta, ResidualRow, kWarps> s{shared, source, nullptr, begin, end, false};
  uint32_t bound;
  bool valid = s.prepare(1.f, 0, 0, bound);
  if (!valid && source.draft) {  // the residual is zero: draft equals target
    __syncthreads();
    source.draft = nullptr;
    valid = s.prepare(1.f, 0, 0, bound);
  }
  uint64_t before = 0, own = 0, total = 0;
  if (valid) {
    s.sum_weights_from(s.min_key);
    total = s.total_weight(before, own);
  }
  pdl_launch_dependents();
  int32_t* tokens = p.tokens + row * (p.drafts + 1);
  for (int i = threadIdx.x; i <= p.drafts; i += kThreads)
    if (i != position || !total) tokens[i] = i < position ? p.draft_tokens[row * p.drafts + i] : -1;
  const uint64_t drawn_weight = uniform_below(total, random_u64(chain_random(p, row, p.drafts)));
  if (total && drawn_weight >= before && drawn_weight < before + own) {
    const int slot = s.locate(s.scale.lowest, drawn_weight - before);
    if (threadIdx.x % 32 == 0) tokens[position] = slot - source.target.first;
  }
  if (threadIdx.x == 0) {
    p.emitted[row] += position;
    p.accepted[row] += accepted;
  }
}

}  // namespace fi
