// Parameters of moe_combine, shared by launcher and device code.
#pragma once
#include "fi/comm/moe_control.h"

namespace fi {

// out[t] = the sum over ranks, in their order, of the row that each returns for token t.
struct MoeCombineParams {
  CommParams comm;
  const int32_t* rows;  // [tokens, kMaxWorld], of the dispatch
  void* out;            // [tokens, hidden]
  int64_t control_offset;
  int64_t offset;                       // in a workspace: [world, max_tokens, hidden]
  int32_t tokens, max_tokens, vectors;  // vectors of a row
};

}  // namespace fi
