// Parameters of all_to_all, shared by launcher and device code.
#pragma once
#include "fi/comm/workspace.h"

namespace fi {

// out[j] of rank i = input[i] of rank j; rows of `bytes` bytes, of which a launch moves `now` from `first` on.
// All-gather sends the same row to every rank: an input stride of 0.
struct AllToAllParams {
  CommParams comm;
  BulkMemory bulk;
  const char* input;     // [world, bytes]
  int64_t input_stride;  // bytes
  char* out;             // [world, bytes]
  int64_t bytes, first, now;
  int32_t chunk_bytes, chunks;  // of a row
};

}  // namespace fi
