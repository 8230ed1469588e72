// How CTAs cover rows of vectors: several short rows in a CTA, or a long row in equal parts.
#pragma once
#include <algorithm>
#include <cstdint>

#include "fi/host/kernel.h"

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

#if FI_CUDA
// Launches whole CTAs of at least `threads` threads in all.
template <class Params>
void launch_threads(const Kernel& kernel, const Entry& entry, int64_t threads, DLDevice device, const Params& params) {
  Launch grid{(threads + entry.threads - 1) / entry.threads};
  grid.pdl = kernel.pdl(-1);
  kernel.launch(entry, grid, device, params);
}

// Launches an entry whose threads index the vectors of all rows with 31 bits: as many rows at a time as that allows.
// params_of(first_row, vectors) gives the parameters of one launch.
template <class ParamsOf>
void launch_rows(const Kernel& kernel, const Entry& entry, int64_t rows, int64_t vectors_per_row,
                 int64_t vectors_per_thread, bool pdl, const Tensor& input, ParamsOf params_of) {
  const int64_t max_rows = 0x7fffffff / vectors_per_row, vectors_per_cta = vectors_per_thread * entry.threads;
  FI_CHECK(max_rows > 0, ValueError, "%s is too wide: got shape %s", input.name(), input.shape_str().c_str());
  for (int64_t first = 0; first < rows; first += max_rows) {
    const int64_t vectors = std::min(max_rows, rows - first) * vectors_per_row;
    Launch part{(vectors + vectors_per_cta - 1) / vectors_per_cta};
    part.pdl = pdl;
    kernel.launch(entry, part, input.device(), params_of(first, static_cast<uint32_t>(vectors)));
  }
}
#endif

}  // namespace fi
