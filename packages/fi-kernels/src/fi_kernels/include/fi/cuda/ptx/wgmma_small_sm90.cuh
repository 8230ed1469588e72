// wgmma (PTX ISA 9.7.15) with few columns: 64 x N x 16 on 16-bit operands and 64 x N x 32 on fp8, both operands K-major
// in shared memory, N = 8 to 64. Accumulators are placed as in wgmma_sm90.cuh.
#pragma once
#include "fi/cuda/ptx/wgmma_sm90.cuh"

namespace fi {

#define FI_NAMES_4 "%0, %1, %2, %3"
#define FI_NAMES_8 FI_NAMES_4 ", %4, %5, %6, %7"
#define FI_NAMES_16 FI_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FI_NAMES_32 \
  FI_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FI_QUAD(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FI_REGISTERS_4 FI_QUAD(0)
#define FI_REGISTERS_8 FI_QUAD(0), FI_QUAD(4)
#define FI_REGISTERS_16 FI_REGISTERS_8, FI_QUAD(8), FI_QUAD(12)
#define FI_REGISTERS_32 FI_REGISTERS_16, FI_QUAD(16), FI_QUAD(20), FI_QUAD(24), FI_QUAD(28)

// d = a b, or d += a b if `add`. The operands after the `count` accumulators have the numbers x0, x1, x2.
#define FI_WGMMA(n, count, x0, x1, x2, k, types, orders, type_a, type_b)                                  \
  FI_DEVICE void wgmma_small_step(float (&d)[count], uint64_t a, uint64_t b, bool add, type_a, type_b) {  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n #k \
                 ".f32." types " {" FI_NAMES_##count "}, %" #x0 ", %" #x1 ", p, 1, 1" orders ";\n}"       \
                 : FI_REGISTERS_##count                                                                   \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
  }
#define FI_WGMMA_TYPES(n, count, x0, x1, x2)                                               \
  FI_WGMMA(n, count, x0, x1, x2, k16, "f16.f16", ", 0, 0", __half, __half)                 \
  FI_WGMMA(n, count, x0, x1, x2, k16, "bf16.bf16", ", 0, 0", __nv_bfloat16, __nv_bfloat16) \
  FI_WGMMA(n, count, x0, x1, x2, k32, "e4m3.e4m3", "", __nv_fp8_e4m3, __nv_fp8_e4m3)       \
  FI_WGMMA(n, count, x0, x1, x2, k32, "e4m3.e5m2", "", __nv_fp8_e4m3, __nv_fp8_e5m2)       \
  FI_WGMMA(n, count, x0, x1, x2, k32, "e5m2.e4m3", "", __nv_fp8_e5m2, __nv_fp8_e4m3)
FI_WGMMA_TYPES(8, 4, 4, 5, 6)
FI_WGMMA_TYPES(16, 8, 8, 9, 10)
FI_WGMMA_TYPES(32, 16, 16, 17, 18)
FI_WGMMA_TYPES(64, 32, 32, 33, 34)

#undef FI_NAMES_4
#undef FI_NAMES_8
#undef FI_NAMES_16
#undef FI_NAMES_32
#undef FI_QUAD
#undef FI_REGISTERS_4
#undef FI_REGISTERS_8
#undef FI_REGISTERS_16
#undef FI_REGISTERS_32
#undef FI_WGMMA
#undef FI_WGMMA_TYPES

}  // namespace fi
