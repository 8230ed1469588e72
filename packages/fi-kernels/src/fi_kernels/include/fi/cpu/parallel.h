// The parallel loop of CPU kernels, on the OpenMP thread pool that the process already has (torch's if it is loaded).
#pragma once

#include <algorithm>
#include <cstdint>

#include "fi/cpu/target.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace fi::cpu {

// Calls f(begin, end) on disjoint, non-empty ranges that together cover [0, n). Each thread that runs gets about
// `grain` iterations or more, so grain is the work that pays for waking a thread (some microseconds). The loop runs
// inline if n <= grain, inside another parallel region, or with one thread. f must not throw.
template <class F>
void parallel_for(int64_t n, [[maybe_unused]] int64_t grain, F&& f) {
  if (n <= 0) return;
#ifdef _OPENMP
  if (n > grain && omp_get_max_threads() > 1 && !omp_in_parallel()) {
    const int64_t max_threads = grain > 1 ? 1 + (n - 1) / grain : n;
    // No num_threads clause: libgomp ends and later restarts threads when the team size changes between regions.
#pragma omp parallel
    {
      const int64_t threads = std::min<int64_t>(omp_get_num_threads(), max_threads);
      const int64_t id = omp_get_thread_num();
      if (id < threads) {
        const int64_t size = n / threads, remainder = n % threads;
        const int64_t begin = id * size + std::min(id, remainder);
        f(begin, begin + size + (id < remainder ? 1 : 0));
      }
    }
    return;
  }
#endif
  f(int64_t{0}, n);
}

}  // namespace fi::cpu
