// Parameters of the merge_state kernels, shared by launcher and device code.
#pragma once
#include "fi/divisor.h"

namespace fi {

// values [n, heads, d] and their base-2 log-sum-exp [n, heads]; strides in elements.
struct AttentionState {
  void* v;
  float* s;
  int64_t v_row, v_head, s_row, s_head;
};

// out = a and b merged; out may be a. Rows with mask 0 are left alone.
struct MergeStateParams {
  AttentionState out, a, b;
  const uint8_t* mask;  // [n], or null: all
  int64_t rows;         // n * heads
  Divisor heads;
  Divisor lanes;  // threads of a row
  int32_t d, rows_per_cta;
  int32_t again;  // whether L2 should keep what is read
};

}  // namespace fi
