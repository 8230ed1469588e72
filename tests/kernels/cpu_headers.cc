// C functions over fi/cpu/*.h for test_cpu_headers.py: conversions, math functions, reductions, parallel_for.
#include "fi/cpu/convert.h"
#include "fi/cpu/math.h"
#include "fi/cpu/parallel.h"
#include "fi/cpu/reduce.h"

#ifdef TEST_ONE_LEVEL  // one build per -march, without clones
#define WORKER extern "C" __attribute__((noinline))
#else
#define WORKER extern "C" __attribute__((noinline)) FI_CLONES
#endif

namespace cpu = fi::cpu;

#define CONVERSIONS(name, type)                                                 \
  WORKER void decode_##name(float* out, const cpu::type* in, int64_t n) {       \
    for (int64_t i = 0; i < n; ++i) out[i] = cpu::to_float(in[i]);              \
  }                                                                             \
  WORKER void encode_##name(cpu::type* out, const float* in, int64_t n) {       \
    for (int64_t i = 0; i < n; ++i) out[i] = cpu::from_float<cpu::type>(in[i]); \
  }
CONVERSIONS(bf16, bf16_t)
CONVERSIONS(f16, f16_t)
CONVERSIONS(e4m3, e4m3_t)
CONVERSIONS(e5m2, e5m2_t)

#define FUNCTION(name)                                               \
  WORKER void apply_##name(float* out, const float* in, int64_t n) { \
    for (int64_t i = 0; i < n; ++i) out[i] = cpu::name(in[i]);       \
  }
FUNCTION(exp)
FUNCTION(exp2)
FUNCTION(log2)
FUNCTION(tanh)
FUNCTION(erf)
FUNCTION(rsqrt)
FUNCTION(sigmoid)
FUNCTION(silu)

// Structured as a kernel: a cloned row worker in a template, called from the parallel loop.
template <class T>
FI_CLONES float sum_of_squares(const T* row, int64_t n) {
  return cpu::sum(n, [=](int64_t i) __attribute__((always_inline)) {
    const float x = cpu::to_float(row[i]);
    return x * x;
  });
}

extern "C" void rows_sum_of_squares(float* out, const cpu::bf16_t* in, int64_t rows, int64_t n, int64_t grain) {
  cpu::parallel_for(rows, grain, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) out[r] = sum_of_squares(in + r * n, n);
  });
}

WORKER void row_maximum(float* out, const float* in, int64_t n) {
  *out = cpu::maximum(n, [=](int64_t i) __attribute__((always_inline)) { return in[i]; });
}

// Counts the visits of each item, and writes the range of each visit; returns the number of calls.
extern "C" int64_t record_ranges(int32_t* visits, int64_t* begins, int64_t* ends, int64_t n, int64_t grain) {
  int64_t calls = 0;
  cpu::parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    for (int64_t i = begin; i < end; ++i) {
      __atomic_fetch_add(&visits[i], 1, __ATOMIC_RELAXED);
      begins[i] = begin;
      ends[i] = end;
    }
  });
  return calls;
}

// parallel_for inside parallel_for: returns the number of inner calls for `outer` outer items.
extern "C" int64_t nested_calls(int64_t outer, int64_t inner) {
  int64_t calls = 0;
  cpu::parallel_for(outer, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      cpu::parallel_for(inner, 1, [&](int64_t, int64_t) { __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); });
    }
  });
  return calls;
}
