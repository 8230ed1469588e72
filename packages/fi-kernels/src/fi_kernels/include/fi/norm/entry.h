// How the norms choose an entry point: the first whose vectors are legal and whose threads hold a row.
#pragma once
#include <algorithm>
#include <cstdint>

#include "fi/host/kernel.h"

#if FI_CUDA
namespace fi {

// config = {rows a block, elements a vector, vectors a thread, largest d}; the choice depends on d and on alignment,
// never on the number of rows, so that a row's sums are taken in the same order in every batch.
inline const Entry& norm_entry(const Kernel& kernel, int64_t d, int64_t vector) {
  for (const Entry& entry : kernel.entries)
    if (entry.config[1] <= vector && d % entry.config[1] == 0 && d <= entry.config[3]) return entry;
  raise("RuntimeError", "no entry of %s takes d = %lld", kernel.spec.c_str(), static_cast<long long>(d));
}

// Blocks of several rows are whole; a block of one row has the warps that its vectors need.
inline Launch norm_launch(const Entry& entry, int64_t rows, int64_t d, bool pdl) {
  const int64_t rows_a_block = entry.config[0], elements = entry.config[1] * entry.config[2];
  Launch launch{(rows + rows_a_block - 1) / rows_a_block};
  if (rows_a_block == 1) launch.threads = std::min(entry.threads, ((d + elements - 1) / elements + 31) / 32 * 32);
  launch.pdl = pdl;
  return launch;
}

}  // namespace fi
#endif
