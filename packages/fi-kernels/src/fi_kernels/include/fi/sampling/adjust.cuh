// Changes to logits before they are sampled: penalties for tokens seen before, a bias, and a mask of what is allowed.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/sampling/sample.h"

namespace fi::sampling {

FI_DEVICE bool is_adjusted(const SampleParams& p) { return p.bias || p.bitmask || p.seen; }

// Of the tokens [low, high), logits[token - low] being theirs. By a whole block.
FI_DEVICE void penalise(const SampleParams& p, float* logits, int low, int high, int64_t output, int64_t row) {
  if (!p.seen) return;
  const float repetition = at(p.repetition, row), frequency = at(p.frequency, row), presence = at(p.presence, row);
#pragma unroll 1
  for (int i = threadIdx.x; i < p.seen_slots; i += blockDim.x) {
    const int token = p.seen[output * p.seen_row + i];
    if (token < low || token >= high) continue;
    const int count = p.seen_count ? p.seen_count[output * p.seen_row + i] : 0;
    logits[token - low] = penalised(logits[token - low], repetition, frequency, presence, count);
  }
}

// One logit; a forbidden token gets -inf.
FI_DEVICE float biased(const SampleParams& p, float x, int token, int64_t output) {
  if (p.bias) x += p.bias[output * p.bias_row + token];
  if (p.bitmask && !(p.bitmask[output * p.bitmask_row + token / 32] >> token % 32 & 1)) x = __int_as_float(0xff800000);
  return x;
}

// The tokens [low, high) from the row to p.adjusted, by the one block that has them. Returns the new row.
FI_DEVICE const float* adjust_in_global(const SampleParams& p, const float* from, int low, int high, int64_t output,
                                        int64_t row) {
  float* to = p.adjusted + output * p.adjusted_row;
  high = min(high, p.vocab);
#pragma unroll 4
  for (int token = low + threadIdx.x; token < high; token += blockDim.x) to[token] = from[token];
  __syncthreads();
  penalise(p, to + low, low, high, output, row);
  __syncthreads();
#pragma unroll 4
  for (int token = low + threadIdx.x; token < high; token += blockDim.x)
    to[token] = biased(p, to[token], token, output);
  __syncthreads();
  return to;
}

}  // namespace fi::sampling
