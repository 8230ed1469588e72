// Adjusts logits before sampling: penalties for tokens seen before, a bias, and a bitmask of allowed tokens.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/sampling/sample.h"

namespace fi::sampling {

FI_DEVICE bool has_adjustments(const SampleParams& p) { return p.bias || p.bitmask || p.seen; }

// Applies the penalties to the tokens [low, high); `logits[token - low]` holds the logit of a token. Every thread of
// the CTA calls it.
FI_DEVICE void apply_penalties(const SampleParams& p, float* logits, int low, int high, int64_t output, int64_t row) {
  if (!p.seen) return;
  const float repetition = at(p.repetition, row), frequency = at(p.frequency, row), presence = at(p.presence, row);
#pragma unroll 1
  for (int i = threadIdx.x; i < p.seen_slots; i += blockDim.x) {
    const int token = p.seen[output * p.seen_stride + i];
    if (token < low || token >= high) continue;
    const int count = p.seen_count ? p.seen_count[output * p.seen_stride + i] : 0;
    logits[token - low] = penalised_logit(logits[token - low], repetition, frequency, presence, count);
  }
}

// Returns one logit plus its bias, or -inf if the bitmask forbids the token.
FI_DEVICE float biased_logit(const SampleParams& p, float x, int token, int64_t output) {
  if (p.bias) x += p.bias[output * p.bias_stride + token];
  if (p.bitmask && !(p.bitmask[output * p.bitmask_stride + token / 32] >> token % 32 & 1))
    x = __int_as_float(0xff800000);
  return x;
}

// Writes the adjusted logits of the tokens [low, high) to `p.adjusted`, by all threads of one CTA. Returns the adjusted
// row.
FI_DEVICE const float* adjust_to_global(const SampleParams& p, const float* from, int low, int high, int64_t output,
                                        int64_t row) {
  float* to = p.adjusted + output * p.adjusted_stride;
  high = min(high, p.vocab);
#pragma unroll 4
  for (int token = low + threadIdx.x; token < high; token += blockDim.x) to[token] = from[token];
  __syncthreads();
  apply_penalties(p, to + low, low, high, output, row);
  __syncthreads();
#pragma unroll 4
  for (int token = low + threadIdx.x; token < high; token += blockDim.x)
    to[token] = biased_logit(p, to[token], token, output);
  __syncthreads();
  return to;
}

}  // namespace fi::sampling
