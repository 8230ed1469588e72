// Launches chain_speculative: verifies a chain of draft tokens and draws the token that follows the accepted ones.
#include "fi/sampling/chain_speculative.h"

#include "fi/generated/chain_speculative.h"
#include "fi/sampling/contract.h"

#if !FI_CUDA
#include "fi/cpu/parallel.h"
#include "fi/sampling/sample_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_row(const ChainParams& p, sampling::CpuRowSampler& s, int64_t row) {
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
    float* residual = s.use_buffer();
    for (int64_t t = 0; t < p.vocab; ++t) residual[t] = target[t] - draft[t];
  }
  bool valid = s.prepare(1.f);
  if (!valid) {  // the residual is zero: draft equals target
    s.x = target;
    valid = s.prepare(1.f);
  }
  if (valid) s.weigh();
  int32_t* tokens = p.tokens + row * (p.drafts + 1);
  for (int64_t i = 0; i <= p.drafts; ++i) tokens[i] = i < position ? p.draft_tokens[row * p.drafts + i] : -1;
  const uint64_t total = valid ? s.total(s.scale.lowest) : 0;
  if (total) {
    const uint64_t drawn_weight =
        sampling::uniform_below(total, sampling::random_u64(sampling::chain_random(p, row, p.drafts)));
    tokens[position] = static_cast<int32_t>(s.locate(s.scale.lowest, drawn_weight));
  }
  p.emitted[row] += static_cast<int32_t>(position);
  p.accepted[row] += accepted;
}
#endif

void chain_speculative(const Kernel& kernel, const ChainSpeculativeArgs& a) {
  // 1 check
  Dim batch{"batch"}, drafts{"num_speculative_tokens"}, vocab{"vocab"};
  a.draft_probs.is({kF32}).contiguous().shape(batch, drafts, vocab);
  a.draft_token_ids.is({kI32}).on(a.draft_probs).contiguous().shape(batch, drafts);
  Dim places{"num_speculative_tokens + 1", drafts + 1};
  a.target_probs.is({kF32}).on(a.draft_probs).contiguous().shape(batch, places, vocab);
  a.tokens.is({kI32}).on(a.draft_probs).contiguous().shape(batch, places);
  a.maybe_output_accepted_token_num.is({kI32}).on(a.draft_probs).contiguous().shape(batch);
  a.maybe_output_emitted_draft_token_num.is({kI32}).on(a.draft_probs).contiguous().shape(batch);
  FI_CHECK(vocab >= 1 && vocab <= 1 << 19 && batch <= 0x7fffffff && drafts < 0x7fffffff, ValueError,
           "draft_probs must have 1 <= vocab <= 2^19, batch and num_speculative_tokens < 2^31; got %s",
           a.draft_probs.shape_str().c_str());

  // 2 shape
  ChainParams p{};
  p.tokens = a.tokens.data<int32_t>();
  p.accepted = a.maybe_output_accepted_token_num.data<int32_t>();
  p.emitted = a.maybe_output_emitted_draft_token_num.data<int32_t>();
  p.draft = a.draft_probs.data<const float>();
  p.draft_tokens = a.draft_token_ids.data<const int32_t>();
  p.target = a.target_probs.data<const float>();
  p.seed = per_row_seed(a.seed, a.seed_value, a.draft_probs, batch);
  p.offset = per_row_seed(a.offset, a.offset_value, a.draft_probs, batch);
  p.per_row_seeds = p.seed.step != 0 || p.offset.step != 0;
  p.batch = static_cast<int32_t>(batch);
  p.drafts = static_cast<int32_t>(drafts);
  p.vocab = static_cast<int32_t>(vocab);
  if (p.batch == 0) return;

  // 3 launch
#if FI_CUDA
  Launch config{p.batch};
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries[0], config, a.draft_probs.device(), p);
#else
  (void)kernel;
  cpu::parallel_for(p.batch, std::max<int64_t>(1, 16384 / p.vocab), [&](int64_t begin, int64_t end) {
    sampling::CpuRowSampler row(p.vocab, false);
    for (int64_t i = begin; i < end; ++i) run_row(p, row, i);
  });
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::chain_speculative)
