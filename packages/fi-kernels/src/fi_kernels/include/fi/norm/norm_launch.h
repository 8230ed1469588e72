// Chooses the kernel entry and the grid of a norm: the first entry whose vector width fits and whose CTA holds a row.
#pragma once
#include <algorithm>
#include <cstdint>

#include "fi/host/kernel.h"

#if FI_CUDA
namespace fi {

// Config is the op's; its fields are those of NormConfig. The choice depends on d and on alignment only, never on the
// number of rows, so a row is summed in the same order in every batch.
template <class Config>
const Entry& tile(const Kernel& kernel, int64_t d, int64_t vec_size) {
  return kernel.first_entry([&](const Entry& entry) {
    const auto config = Config::of(entry);
    return config.vec_size <= vec_size && d % config.vec_size == 0 && d <= config.max_d;
  });
}

// A CTA of several rows launches all threads of its entry; a CTA of one row launches the warps that the row needs.
template <class Config>
Launch norm_launch(const Entry& entry, int64_t rows, int64_t d, bool pdl) {
  const auto config = Config::of(entry);
  const int64_t elements_per_thread = config.vec_size * config.vectors_per_thread;
  Launch launch{(rows + config.rows_per_cta - 1) / config.rows_per_cta};
  if (config.rows_per_cta == 1)
    launch.threads = std::min(entry.threads, ((d + elements_per_thread - 1) / elements_per_thread + 31) / 32 * 32);
  launch.pdl = pdl;
  return launch;
}

}  // namespace fi
#endif
