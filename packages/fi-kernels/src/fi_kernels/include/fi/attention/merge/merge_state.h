// Parameters of the merge_state kernels, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// values [n, heads, d] and their base-2 log-sum-exp [n, heads].
struct AttentionState {
  void* v;
  float* s;
};
struct StateStrides {  // in elements
  int64_t v_row, v_head, s_row, s_head;
};

// out = a and b merged; out may be a. Rows with mask 0 are left alone. What the compact kernel reads comes first: each
// line of constants comes from memory.
struct MergeStateParams {
  AttentionState a, b, out;
  uint32_t vectors;  // of all rows, if rows are whole vectors
  int32_t again;     // whether L2 should keep what is read
  Divisor lanes;     // threads of a row
  Divisor heads;
  int64_t rows;  // n * heads
  int32_t d, rows_per_cta;
  const uint8_t* mask;  // [n], or null: all
  StateStrides a_strides, b_strides, out_strides;
};

}  // namespace fi
