// Parameters of all_to_all, shared by launcher and device code.
#pragma once
#include "fi/comm/workspace.h"

namespace fi {

// out[j] of rank i = input[i] of rank j; rows of `bytes` bytes, of which a launch moves `now` from `first` on.
struct AllToAllParams {
  CommParams comm;
  BulkMemory bulk;
  const char* input;  // [world, bytes], as out
  char* out;
  int64_t bytes, first, now;
  int32_t chunk_bytes, chunks;  // of a row
};

}  // namespace fi
