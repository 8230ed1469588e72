// Parameters of get_batch_indices_positions, shared by launcher and device code.
#pragma once
#include "fi/types.h"

namespace fi {

struct BatchPositionsParams {
  int32_t *batch_indices, *positions;       // [rows]
  const int32_t *append_indptr, *seq_lens;  // [batch_size + 1], [batch_size]
  int64_t rows;
  int32_t batch_size;
  int32_t fill_positions;  // 1: padding rows (of no request) get position 0; 0: their position is not written
};

}  // namespace fi
