// Parameters of the merge_states kernels, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// v [n, states, heads, d] with base-2 log-sum-exp s [n, states, heads] -> out [n, heads, d], out_s [n, heads], both
// contiguous. Strides in elements.
struct MergeStatesParams {
  void* out;
  float* out_s;
  const void* v;
  const float* s;
  int64_t v_row, v_state, v_head, s_row, s_state, s_head;
  int64_t rows;  // n * heads
  Divisor heads;
  Divisor lanes, per_row;  // threads of a state's row; threads of a row of the output: lanes * groups
  int32_t states, d;
  int32_t groups, rows_per_cta;
  int32_t again;  // whether L2 should keep what is read
};

}  // namespace fi
