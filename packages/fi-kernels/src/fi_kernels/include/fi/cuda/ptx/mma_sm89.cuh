// mma.sync m16n8k32 with 8-bit floats and fp32 accumulators (PTX ISA 9.7.14.5, sm_89 and later).
#pragma once
#include <cuda_fp8.h>

#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

#define FI_MMA_M16N8K32(A, B, a_name, b_name)                                                          \
  FI_DEVICE void mma_m16n8k32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, A, B) { \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." a_name "." b_name                            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                      \
  }

// d += a b: a 16x32 by rows, b 32x8 by columns. Lane l holds d at rows l/4 and l/4 + 8, columns 2(l%4) and the next.
FI_MMA_M16N8K32(__nv_fp8_e4m3, __nv_fp8_e4m3, "e4m3", "e4m3")
FI_MMA_M16N8K32(__nv_fp8_e4m3, __nv_fp8_e5m2, "e4m3", "e5m2")
FI_MMA_M16N8K32(__nv_fp8_e5m2, __nv_fp8_e4m3, "e5m2", "e4m3")
#undef FI_MMA_M16N8K32

}  // namespace fi
