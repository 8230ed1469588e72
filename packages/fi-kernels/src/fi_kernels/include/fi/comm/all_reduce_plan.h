// The memory that a launch takes.
#pragma once
#include "fi/comm/all_reduce.h"

namespace fi {

// Vectors that a launch of `rows` rows writes to a workspace: one shot fills an inbox for each other rank; two shots
// fill an inbox for each other rank with rows of this one, and every row of the result. The rows of kScatter are of a
// slice, so it takes what one shot takes.
inline int64_t workspace_vectors(int32_t form, int64_t rows, int64_t vectors, int64_t world) {
  if (form != kTwoShot) return (world - 1) * rows * vectors;
  return ((world - 1) * ((rows + world - 1) / world) + rows) * vectors;
}

// The most rows, up to `rows`, that a launch can send with `bytes` of a workspace; 0: not one.
inline int64_t rows_at_once(int32_t form, int64_t rows, int64_t vectors, int64_t world, int64_t bytes) {
  if (workspace_vectors(form, rows, vectors, world) * 16 <= bytes) return rows;
  const int64_t fit = bytes / (vectors * 16);
  if (form != kTwoShot) return fit / (world - 1);
  return fit / (2 * world - 1) * world;  // groups of a row for each rank
}

}  // namespace fi
