// The choice of a tile among the entries of the Hopper GEMM, by launchers.
#pragma once
#include "fi/gemm/gemm_cost.h"
#include "fi/gemm/gemm_operand.h"

namespace fi {
#if FI_CUDA

// An entry, its config, and the CTAs of a cluster that split k.
template <class Config>
struct GemmChoice {
  const Entry* entry = nullptr;
  Config config{};
  int64_t splits = 1;
};

// The cheapest of the entries whose config `takes` the problem, or the one that `tactic` counts.
template <class Config, class Takes>
GemmChoice<Config> wgmma_tile(const Kernel& kernel, const GemmShape& shape, int64_t multiprocessors, int64_t tactic,
                              const Takes& takes) {
  GemmChoice<Config> best;
  double least = 0;
  int64_t number = 0;
  for (const Entry& entry : kernel.entries) {
    const auto config = Config::of(entry);
    const bool fits = takes(config);
    if (fits && tactic == number) return {&entry, config};
    const double cost = gemm_cost(shape, {config.rows, config.columns, config.k_block_clocks}, multiprocessors);
    if (fits && (!best.entry || cost < least)) best = {&entry, config}, least = cost;
    ++number;
  }
  FI_CHECK(best.entry && tactic < 0, ValueError, "tactic must be -1, or one of this problem below %lld; got %lld",
           static_cast<long long>(number), static_cast<long long>(tactic));
  return best;
}

#endif
}  // namespace fi
