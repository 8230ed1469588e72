// Parameters of moe_dispatch, shared by launcher and device code.
#pragma once
#include "fi/comm/moe_control.h"

namespace fi {

constexpr int32_t kMaxPayloads = 4;

// Expert e is on rank e / experts_per_rank. A token is sent once to each rank that has any of its experts; its row
// there, within the rows of its source, is the number of earlier tokens of the source with that target.
struct MoeDispatchParams {
  CommParams comm;
  const int32_t* experts;  // [tokens, top_k]; others than 0..num_experts - 1 are ignored
  int32_t* rows;           // [tokens, kMaxWorld]: the row of each token at each rank, or -1
  int32_t* counts;         // [world]: received rows, by source
  int64_t control_offset;  // of MoeControl in a workspace
  struct Payload {
    const char* from;     // [tokens, bytes]
    int64_t offset;       // in a workspace: [world, max_tokens, bytes]
    int32_t bytes, unit;  // unit: bytes of the widest vector that fits all rows
  } payloads[kMaxPayloads];
  int32_t num_payloads;
  int32_t tokens, top_k, num_experts, experts_per_rank, max_tokens, tokens_per_cta;
};

}  // namespace fi
