// Named barriers of a CTA (PTX ISA 9.7.13.1): `threads`, a multiple of 32, is how many meet. Barrier 0 is that of
// __syncthreads.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

FI_DEVICE void barrier_sync(int barrier, int threads) {
  delay<kDelayBarriers>();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  delay<kDelayBarriers>();
}
// Whether x is true in any of the threads. NOTE: the vote tells the compiler that all lanes get the same.
FI_DEVICE bool barrier_any(int barrier, int threads, bool x) {
  int any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(barrier), "r"(threads), "r"(static_cast<int>(x))
               : "memory");
  return __any_sync(0xffffffffu, any);
}

}  // namespace fi
