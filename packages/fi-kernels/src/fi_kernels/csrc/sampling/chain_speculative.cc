// chain_speculative: verification of draft tokens in a chain, and the token that follows the accepted ones.
#include "fi/sampling/chain_speculative.h"

#include "fi/host/op.h"
#include "fi/sampling/contract.h"

#if !FI_CUDA
#include "fi/cpu/parallel.h"
#include "fi/sampling/cpu_row.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_row(const ChainParams& p, sampling::CpuRow& s, int64_t row) {
  int64_t position = p.drafts;
  int32_t accepted = 0;
  for (int64_t i = 0; i < p.drafts; ++i) {
    if (sampling::accepts(p, row, i))
      ++accepted;
    else if (position == p.drafts)
      position = i;
  }
  const float* target = p.target + (row * (p.drafts + 1) + position) * p.vocab;
  s.x = target;
  if (position < p.drafts) {
    const float* draft = p.draft + (row * p.drafts + position) * p.vocab;
    float* rest = s.own();
    for (int64_t t = 0; t < p.vocab; ++t) rest[t] = target[t] - draft[t];
  }
  bool valid = s.prepare(1.f);
  if (!valid) {  // nothing is left over: both are the same
    s.x = target;
    valid = s.prepare(1.f);
  }
  if (valid) s.weigh();
  int32_t* tokens = p.tokens + row * (p.drafts + 1);
  for (int64_t i = 0; i <= p.drafts; ++i) tokens[i] = i < position ? p.draft_tokens[row * p.drafts + i] : -1;
  const uint64_t total = valid ? s.total(s.scale.lowest) : 0;
  if (total) {
    const uint64_t wanted =
        sampling::uniform_below(total, sampling::random_of(sampling::chain_random(p, row, p.drafts)));
    tokens[position] = static_cast<int32_t>(s.locate(s.scale.lowest, wanted));
  }
  p.emitted[row] += static_cast<int32_t>(position);
  p.accepted[row] += accepted;
}
#endif

void chain(const Kernel& kernel, Tensor tokens, Tensor accepted, Tensor emitted, Tensor draft_probs,
           Tensor draft_token_ids, Tensor target_probs, OptionalTensor seed, int64_t seed_value, OptionalTensor offset,
           int64_t offset_value) {
  // 1 check
  Dim batch{"batch"}, drafts{"num_speculative_tokens"}, vocab{"vocab"};
  draft_probs.is({kF32}).contiguous().shape(batch, drafts, vocab);
  draft_token_ids.is({kI32}).on(draft_probs).contiguous().shape(batch, drafts);
  Dim places{"num_speculative_tokens + 1", drafts + 1};
  target_probs.is({kF32}).on(draft_probs).contiguous().shape(batch, places, vocab);
  tokens.is({kI32}).on(draft_probs).contiguous().shape(batch, places);
  accepted.is({kI32}).on(draft_probs).contiguous().shape(batch);
  emitted.is({kI32}).on(draft_probs).contiguous().shape(batch);
  FI_CHECK(vocab >= 1 && vocab <= 1 << 19 && batch <= 0x7fffffff && drafts < 0x7fffffff, ValueError,
           "draft_probs must have 1 <= vocab <= 2^19, batch and num_speculative_tokens < 2^31; got %s",
           draft_probs.shape_str().c_str());

  // 2 shape
  ChainParams p{};
  p.tokens = tokens.data<int32_t>();
  p.accepted = accepted.data<int32_t>();
  p.emitted = emitted.data<int32_t>();
  p.draft = draft_probs.data<const float>();
  p.draft_tokens = draft_token_ids.data<const int32_t>();
  p.target = target_probs.data<const float>();
  p.seed = per_row_seed(seed, seed_value, draft_probs, batch);
  p.offset = per_row_seed(offset, offset_value, draft_probs, batch);
  p.per_row_random = p.seed.step != 0 || p.offset.step != 0;
  p.batch = static_cast<int32_t>(batch);
  p.drafts = static_cast<int32_t>(drafts);
  p.vocab = static_cast<int32_t>(vocab);
  if (p.batch == 0) return;

  // 3 launch
#if FI_CUDA
  Launch config{p.batch};
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries[0], config, draft_probs.device(), p);
#else
  (void)kernel;
  cpu::parallel_for(p.batch, std::max<int64_t>(1, 16384 / p.vocab), [&](int64_t begin, int64_t end) {
    sampling::CpuRow row(p.vocab, false);
    for (int64_t i = begin; i < end; ++i) run_row(p, row, i);
  });
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::chain, "tokens", "maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num", "draft_probs",
      "draft_token_ids", "target_probs", "seed", "seed", "offset", "offset")
