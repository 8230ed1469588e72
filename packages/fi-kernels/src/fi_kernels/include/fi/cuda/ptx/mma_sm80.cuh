// mma.sync with fp32 accumulators (PTX ISA 9.7.15.5, sm_80 and later): m16n8k16 with 16-bit operands, m16n8k8 in tf32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// d += a b: a 16x16 by rows, b 16x8 by columns. Lane l holds d at rows l/4 and l/4 + 8, columns 2(l%4) and the next.
FI_DEVICE void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FI_DEVICE void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b in tf32: a 16x8 by rows, b 8x8 by columns; the lowest 13 bits of operands are not read. Lane l holds a at
// rows l/4 and l/4 + 8 of column l%4, then of column l%4 + 4; b at column l/4, rows l%4 and l%4 + 4; d as above.
FI_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Rounds to tf32, ties away from zero.
FI_DEVICE unsigned tf32(float x) { return __float_as_uint(x) + 0x1000u; }

}  // namespace fi
