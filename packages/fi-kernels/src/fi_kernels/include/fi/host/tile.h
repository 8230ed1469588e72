// How CTAs cover rows of vectors: several short rows in a CTA, or a long row in equal parts.
#pragma once
#include <cstdint>

namespace fi {

// `lanes` threads work on a row, and a CTA of `threads` threads on `rows` rows; a row is lanes * parts vectors or a
// little less. In device code, threadIdx.x / lanes >= blockDim.x / lanes marks the idle threads.
struct RowTile {
  int64_t lanes, parts, rows, threads;

  RowTile(int64_t vectors, int64_t limit) {
    parts = (vectors + limit - 1) / limit;
    lanes = (vectors + parts - 1) / parts;
    rows = limit / lanes;
    threads = (rows * lanes + 31) / 32 * 32;
  }
};

}  // namespace fi
