// The choice of a tile shape among the entries of the Hopper GEMM, by launchers.
#pragma once
#include "fi/gemm/gemm_cost.h"
#include "fi/gemm/gemm_operand.h"

namespace fi {
#if FI_CUDA

struct GemmPlan {
  const Entry* entry = nullptr;
  GemmTiling tiling{};
};

// The cheapest of the entries whose config `takes` the problem, or the one that `tactic` counts.
template <class Config, class Takes>
GemmPlan plan_gemm(const Kernel& kernel, const GemmShape& shape, int64_t multiprocessors, int64_t tactic,
                   const Takes& takes) {
  GemmPlan best;
  double least = 0;
  int64_t number = 0;
  for (const Entry& entry : kernel.entries) {
    const auto config = Config::of(entry);
    const GemmTiling tiling{config.rows, config.columns, config.k_block_clocks};
    const bool fits = takes(config);
    if (fits && tactic == number) return {&entry, tiling};
    const double cost = gemm_cost(shape, tiling, multiprocessors);
    if (fits && (!best.entry || cost < least)) best = {&entry, tiling}, least = cost;
    ++number;
  }
  FI_CHECK(best.entry && tactic < 0, ValueError, "tactic must be -1, or one of this problem below %lld; got %lld",
           static_cast<long long>(number), static_cast<long long>(tactic));
  return best;
}

#endif
}  // namespace fi
