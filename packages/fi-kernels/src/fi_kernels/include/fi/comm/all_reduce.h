// Parameters of all_reduce, shared by launcher and device code.
#pragma once
#include "fi/comm/workspace.h"

namespace fi {

// What is written: the sum; or s = sum + residual_in, its norm (RMSNorm), and the norm in a quantized form.
enum ReduceOutput : int32_t { kReduceSum = 0, kReduceNorm = 1, kReduceE4m3 = 2, kReduceE2m1 = 3 };

// Rows are of the message: tokens if a norm follows, else pieces of a flat tensor, of which the last may be short.
struct AllReduceParams {
  CommParams comm;
  const void* input;  // [rows, d], contiguous, as are the other tensors
  void* out;          // the sum, or s; null: not wanted
  const void* residual_in;
  const void* weight;     // [d]
  const float* scale;     // one float; null: 1
  void* norm_out;         // null: not wanted
  void* quant_out;        // e4m3 or e2m1
  void* scale_out;        // of blocks of 16 elements, e4m3
  int64_t total;          // vectors of 16 bytes of the message
  int32_t rows, vectors;  // vectors of a row
  int32_t used;           // vectors that this call writes to a workspace
  int32_t first_row;      // of these rows in scale_out
  int32_t layout, scale_columns;
  int32_t early_trigger;  // 1: the next kernel may be scheduled when this one has sent its data
  float eps, inv_d;
};

}  // namespace fi
