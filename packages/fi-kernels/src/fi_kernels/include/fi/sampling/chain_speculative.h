// Declares the parameters of chain_speculative and its acceptance test, shared by CPU and CUDA code.
#pragma once
#include "fi/sampling/sample.h"

namespace fi {

struct ChainParams {
  int32_t* tokens;    // [batch, drafts + 1]
  int32_t* accepted;  // [batch], incremented
  int32_t* emitted;
  const float* draft;  // [batch, drafts, vocab]
  const int32_t* draft_tokens;
  const float* target;  // [batch, drafts + 1, vocab]
  PerRowSeed seed, offset;
  int32_t batch, drafts, vocab;
  bool per_row_seeds;
};

namespace sampling {

FI_EXACT Random chain_random(const ChainParams& p, int64_t row, int64_t position) {
  const uint64_t offset = at(p.offset, row) + static_cast<uint64_t>(position);
  return philox(at(p.seed, row), offset, p.per_row_seeds ? 0 : static_cast<uint64_t>(row));
}

// Whether the target accepts draft token i: `u < target / draft` with u uniform in (0, 1] (Leviathan et al. 2022,
// arXiv:2211.17192). A token id outside the vocabulary is rejected.
FI_EXACT bool accepts(const ChainParams& p, int64_t row, int64_t i) {
  const int64_t token = p.draft_tokens[row * p.drafts + i];
  if (token < 0 || token >= p.vocab) return false;
  const float draft = p.draft[(row * p.drafts + i) * p.vocab + token];
  const float target = p.target[(row * (p.drafts + 1) + i) * p.vocab + token];
  const float u = mul_rn(static_cast<float>((chain_random(p, row, i).x[0] >> 8) + 1), 0x1p-24f);
  return mul_rn(u, draft) < target;
}

}  // namespace sampling
}  // namespace fi
