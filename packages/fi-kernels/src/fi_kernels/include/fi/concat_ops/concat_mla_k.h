// Parameters of concat_mla_k, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// k[token, head] = [k_nope[token, head], k_rope[token]]. Strides are in bytes, widths in vectors.
struct ConcatMlaKParams {
  char* k;             // [tokens, heads, nope + rope]
  const char* k_nope;  // [tokens, heads, nope]
  const char* k_rope;  // [tokens, rope]
  int64_t k_token, k_head, nope_token, nope_head, rope_token;
  Divisor width;          // nope + rope
  int32_t nope, vectors;  // vectors: of a token, all heads
};

}  // namespace fi
