// wgmma (PTX ISA 9.7.15): 64 x N x 16 products of a warpgroup on 16-bit operands, and 64 x N x 32 on e4m3, fp32
// accumulators in registers.
// Lane l of warp w holds d[4 j + i] at row 16 w + l / 4 + 8 (i / 2), column 8 j + 2 (l % 4) + i % 2.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "fi/cuda/ptx/pdl.cuh"
#include "fi/types.h"

namespace fi {

// Orders register accesses before the next wgmma that touches them.
FI_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FI_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending of the committed groups run.
template <int kPending>
FI_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to accumulators across a wait.
template <int kCount>
FI_DEVICE void wgmma_keep(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

enum WgmmaSwizzle : unsigned { kWgmma128Bytes = 1, kWgmma32Bytes = 3 };

// An operand in shared memory in the 128-byte swizzle, 1024-byte aligned but for steps within a row (PTX
// ISA 9.7.15.5.1). K-major (rows of 64 elements along k): groups of 8 rows are `group` bytes apart. MN-major (rows of
// 64 elements along m or n): groups of 8 k are `group` bytes apart, and blocks of 64 columns `leading` bytes. In the
// 32-byte swizzle rows are as long, and operands are aligned to 256 bytes.
FI_DEVICE uint64_t wgmma_operand(const void* shared, unsigned group, unsigned leading = 16,
                                 WgmmaSwizzle swizzle = kWgmma128Bytes) {
  const uint64_t address = (static_cast<unsigned>(__cvta_generic_to_shared(shared)) & 0x3ffff) >> 4;
  return address | static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(group >> 4) << 32 |
         static_cast<uint64_t>(swizzle) << 62;
}
// The same operand so many bytes further: one addition, where building it anew takes five instructions in a chain.
FI_DEVICE uint64_t wgmma_further(uint64_t operand, unsigned bytes) {
  return (operand & 0xffffffff00000000ull) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

// The same operand, known to be the same in all lanes: steps from it are then computed once a warp.
FI_DEVICE uint64_t wgmma_uniform(uint64_t operand) {
  return (operand & 0xffffffff00000000ull) | __shfl_sync(0xffffffffu, static_cast<uint32_t>(operand), 0);
}

// Text and constraints of 8 accumulators from number i on, and of n of them.
#define FI_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FI_NAMES_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FI_NAMES_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FI_NAMES_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FI_NAMES_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FI_NAMES_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FI_NAMES_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FI_NAMES_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FI_NAMES_64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FI_NAMES_72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FI_NAMES_80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FI_NAMES_88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FI_NAMES_96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FI_NAMES_104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FI_NAMES_112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FI_NAMES_120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FI_REGISTERS(i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FI_NAMES_UP_TO_32 FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24
#define FI_REGISTERS_UP_TO_32 FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24)
#define FI_NAMES_UP_TO_40 FI_NAMES_UP_TO_32 ", " FI_NAMES_32
#define FI_REGISTERS_UP_TO_40 FI_REGISTERS_UP_TO_32, FI_REGISTERS(32)
#define FI_NAMES_UP_TO_48 FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40
#define FI_REGISTERS_UP_TO_48 \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40)
#define FI_NAMES_UP_TO_56 \
  FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40 ", " FI_NAMES_48
#define FI_REGISTERS_UP_TO_56                                                                               \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40), \
      FI_REGISTERS(48)
#define FI_NAMES_UP_TO_64                                                                                         \
  FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40 ", " FI_NAMES_48 \
             ", " FI_NAMES_56
#define FI_REGISTERS_UP_TO_64                                                                               \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40), \
      FI_REGISTERS(48), FI_REGISTERS(56)
#define FI_NAMES_UP_TO_80 FI_NAMES_UP_TO_64 ", " FI_NAMES_64 ", " FI_NAMES_72
#define FI_REGISTERS_UP_TO_80 FI_REGISTERS_UP_TO_64, FI_REGISTERS(64), FI_REGISTERS(72)
#define FI_NAMES_UP_TO_96                                                                                         \
  FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40 ", " FI_NAMES_48 \
             ", " FI_NAMES_56 ", " FI_NAMES_64 ", " FI_NAMES_72 ", " FI_NAMES_80 ", " FI_NAMES_88
#define FI_REGISTERS_UP_TO_96                                                                               \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40), \
      FI_REGISTERS(48), FI_REGISTERS(56), FI_REGISTERS(64), FI_REGISTERS(72), FI_REGISTERS(80), FI_REGISTERS(88)
#define FI_NAMES_UP_TO_128                                                                                         \
  FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40 ", " FI_NAMES_48  \
             ", " FI_NAMES_56 ", " FI_NAMES_64 ", " FI_NAMES_72 ", " FI_NAMES_80 ", " FI_NAMES_88 ", " FI_NAMES_96 \
             ", " FI_NAMES_104 ", " FI_NAMES_112 ", " FI_NAMES_120
#define FI_REGISTERS_UP_TO_128                                                                                    \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40),       \
      FI_REGISTERS(48), FI_REGISTERS(56), FI_REGISTERS(64), FI_REGISTERS(72), FI_REGISTERS(80), FI_REGISTERS(88), \
      FI_REGISTERS(96), FI_REGISTERS(104), FI_REGISTERS(112), FI_REGISTERS(120)

// d = a b, or d += a b. First a and b in shared memory, both K-major; then a in registers, as four packed pairs of
// mma.m16n8k16, or four quadruples of mma.m16n8k32, and b MN-major if it has 16 bits, K-major if 8. The operands after
// the `count` accumulators have the numbers x0, x1, ...
#define FI_WGMMA(n, count, x0, x1, x2, x3, x4, x5, k, name, orders, order, type)                                       \
  FI_DEVICE void wgmma_m64##k(float (&d)[count], uint64_t a, uint64_t b, bool add, type) {                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n #k ".f32." name \
                 "." name " {" FI_NAMES_UP_TO_##count "}, %" #x0 ", %" #x1 ", p, 1, 1" orders ";\n}"                   \
                 : FI_REGISTERS_UP_TO_##count                                                                          \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                        \
  }                                                                                                                    \
  FI_DEVICE void wgmma_m64##k(float (&d)[count], const unsigned (&a)[4], uint64_t b, bool add, type) {                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n #k ".f32." name \
                 "." name " {" FI_NAMES_UP_TO_##count "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #x4             \
                                                      ", p, 1, 1" order ";\n}"                                         \
                 : FI_REGISTERS_UP_TO_##count                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                    \
  }
#define FI_WGMMA_16(n, count, x0, x1, x2, x3, x4, x5)                             \
  FI_WGMMA(n, count, x0, x1, x2, x3, x4, x5, k16, "f16", ", 0, 0", ", 1", __half) \
  FI_WGMMA(n, count, x0, x1, x2, x3, x4, x5, k16, "bf16", ", 0, 0", ", 1", __nv_bfloat16)
#define FI_WGMMA_8(n, count, x0, x1, x2, x3, x4, x5) \
  FI_WGMMA(n, count, x0, x1, x2, x3, x4, x5, k32, "e4m3", "", "", __nv_fp8_e4m3)
FI_WGMMA_16(64, 32, 32, 33, 34, 35, 36, 37)
FI_WGMMA_16(80, 40, 40, 41, 42, 43, 44, 45)
FI_WGMMA_16(96, 48, 48, 49, 50, 51, 52, 53)
FI_WGMMA_16(112, 56, 56, 57, 58, 59, 60, 61)
FI_WGMMA_16(128, 64, 64, 65, 66, 67, 68, 69)
FI_WGMMA_16(160, 80, 80, 81, 82, 83, 84, 85)
FI_WGMMA_16(192, 96, 96, 97, 98, 99, 100, 101)
FI_WGMMA_16(256, 128, 128, 129, 130, 131, 132, 133)
FI_WGMMA_8(96, 48, 48, 49, 50, 51, 52, 53)
FI_WGMMA_8(128, 64, 64, 65, 66, 67, 68, 69)

#undef FI_NAMES_0
#undef FI_NAMES_8
#undef FI_NAMES_16
#undef FI_NAMES_24
#undef FI_NAMES_32
#undef FI_NAMES_40
#undef FI_NAMES_48
#undef FI_NAMES_56
#undef FI_NAMES_64
#undef FI_NAMES_72
#undef FI_NAMES_80
#undef FI_NAMES_88
#undef FI_NAMES_96
#undef FI_NAMES_104
#undef FI_NAMES_112
#undef FI_NAMES_120
#undef FI_REGISTERS
#undef FI_NAMES_UP_TO_32
#undef FI_REGISTERS_UP_TO_32
#undef FI_NAMES_UP_TO_40
#undef FI_REGISTERS_UP_TO_40
#undef FI_NAMES_UP_TO_48
#undef FI_REGISTERS_UP_TO_48
#undef FI_NAMES_UP_TO_56
#undef FI_REGISTERS_UP_TO_56
#undef FI_NAMES_UP_TO_64
#undef FI_REGISTERS_UP_TO_64
#undef FI_NAMES_UP_TO_80
#undef FI_REGISTERS_UP_TO_80
#undef FI_NAMES_UP_TO_96
#undef FI_REGISTERS_UP_TO_96
#undef FI_NAMES_UP_TO_128
#undef FI_REGISTERS_UP_TO_128
#undef FI_WGMMA
#undef FI_WGMMA_16
#undef FI_WGMMA_8

}  // namespace fi
