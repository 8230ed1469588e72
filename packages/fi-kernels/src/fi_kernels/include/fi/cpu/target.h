// Function attributes of CPU kernels: one object file that runs at the speed of every x86-64 level.
#pragma once

#include <cstdint>  // on glibc also defines __GLIBC__, tested below

// For every helper called from an FI_CLONES function: a helper that is not inlined runs as baseline code.
#define FI_INLINE inline __attribute__((always_inline))

// For worker functions: compiled once per level, chosen once per process by the dynamic loader (so glibc only).
// NOTE: GCC outlines OpenMP regions before it clones. A `#pragma omp parallel` (or parallel_for) inside an FI_CLONES
// function would run as baseline code: call the worker from the parallel loop instead. `#pragma omp simd` is fine.
// Lambdas inside a worker are functions of their own too: mark them __attribute__((always_inline)).
#if !defined(FI_ONE_LEVEL) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && \
    !defined(__clang__)
#define FI_HAS_LEVELS 1
#define FI_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FI_HAS_LEVELS 0
#define FI_CLONES
#endif
