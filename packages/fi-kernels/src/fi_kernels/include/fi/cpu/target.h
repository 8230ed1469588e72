// Function attributes of CPU kernels: one object file holds code for each x86-64 level (baseline, AVX2, AVX-512).
#pragma once

#include <cstdint>  // on glibc also defines __GLIBC__, tested below

// Marks every helper that an FI_CLONES function calls: a helper that is not inlined runs as baseline code.
#define FI_INLINE inline __attribute__((always_inline))

// Marks worker functions: the compiler compiles one clone per level, and the dynamic loader chooses a clone once per
// process (glibc only).
// NOTE: GCC outlines OpenMP regions before it clones. A `#pragma omp parallel` (or parallel_for) inside an FI_CLONES
// function runs as baseline code: call the worker from the parallel loop instead. `#pragma omp simd` is cloned.
// A lambda inside a worker is a separate function too: mark it __attribute__((always_inline)).
// FI_NO_CLONES leaves only the levels that are written by hand; FI_ONE_LEVEL leaves none.
#if !defined(FI_ONE_LEVEL) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && \
    !defined(__clang__)
#define FI_HAS_LEVELS 1
#else
#define FI_HAS_LEVELS 0
#endif
#if FI_HAS_LEVELS && !defined(FI_NO_CLONES)
#define FI_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FI_CLONES
#endif
