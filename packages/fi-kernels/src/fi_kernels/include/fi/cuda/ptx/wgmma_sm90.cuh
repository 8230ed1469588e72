// wgmma (PTX ISA 9.7.15): 64 x N x 16 products of a warpgroup on 16-bit operands, and 64 x N x 32 on fp8, fp32
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

enum WgmmaSwizzle : unsigned { kWgmmaNone = 0, kWgmma128Bytes = 1, kWgmma32Bytes = 3 };

// An operand in shared memory in the 128-byte swizzle, 1024-byte aligned but for steps within a row (PTX
// ISA 9.7.15.5.1). K-major (rows of 64 elements along k): groups of 8 rows are `group` bytes apart. MN-major (rows of
// 64 elements along m or n): groups of 8 k are `group` bytes apart, and blocks of 64 columns `leading` bytes. In the
// 32-byte swizzle rows are as long, and operands are aligned to 256 bytes. Without swizzle a K-major operand consists
// of 8x8 matrices of 128 contiguous bytes: `group` bytes apart along m or n, `leading` bytes along k.
FI_DEVICE uint64_t wgmma_operand(const void* shared, unsigned group, unsigned leading = 16,
                                 WgmmaSwizzle swizzle = kWgmma128Bytes) {
  const uint64_t address = (static_cast<unsigned>(__cvta_generic_to_shared(shared)) & 0x3ffff) >> 4;
  return address | static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(group >> 4) << 32 |
         static_cast<uint64_t>(swizzle) << 62;
}
// The same operand `bytes` further: one addition instead of a chain of five instructions.
FI_DEVICE uint64_t wgmma_further(uint64_t operand, unsigned bytes) {
  return (operand & 0xffffffff00000000ull) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

// The same operand, known to be the same in all lanes: steps from it are then computed once a warp.
FI_DEVICE uint64_t wgmma_uniform(uint64_t operand) {
  return (operand & 0xffffffff00000000ull) | __shfl_sync(0xffffffffu, static_cast<uint32_t>(operand), 0);
}

// The operands of n accumulators in the text of the instruction, and their constraints.
#define FI_ACCUMULATORS_4 "%0, %1, %2, %3"
#define FI_ACCUMULATORS_8 FI_ACCUMULATORS_4 ", %4, %5, %6, %7"
#define FI_ACCUMULATORS_12 FI_ACCUMULATORS_8 ", %8, %9, %10, %11"
#define FI_ACCUMULATORS_16 FI_ACCUMULATORS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FI_ACCUMULATORS_24 FI_ACCUMULATORS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FI_ACCUMULATORS_32 \
  FI_ACCUMULATORS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FI_ACCUMULATORS_40 FI_ACCUMULATORS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FI_ACCUMULATORS_48 FI_ACCUMULATORS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FI_ACCUMULATORS_56 FI_ACCUMULATORS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FI_ACCUMULATORS_64 FI_ACCUMULATORS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FI_ACCUMULATORS_68 FI_ACCUMULATORS_64 ", %64, %65, %66, %67"
#define FI_ACCUMULATORS_80 \
  FI_ACCUMULATORS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FI_ACCUMULATORS_88 FI_ACCUMULATORS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FI_ACCUMULATORS_96 FI_ACCUMULATORS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FI_ACCUMULATORS_104 FI_ACCUMULATORS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FI_ACCUMULATORS_128                                        \
  FI_ACCUMULATORS_104                                              \
  ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FI_CONSTRAINTS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FI_CONSTRAINTS_4 FI_CONSTRAINTS(0)
#define FI_CONSTRAINTS_8 FI_CONSTRAINTS_4, FI_CONSTRAINTS(4)
#define FI_CONSTRAINTS_12 FI_CONSTRAINTS_8, FI_CONSTRAINTS(8)
#define FI_CONSTRAINTS_16 FI_CONSTRAINTS_8, FI_CONSTRAINTS(8), FI_CONSTRAINTS(12)
#define FI_CONSTRAINTS_24 FI_CONSTRAINTS_16, FI_CONSTRAINTS(16), FI_CONSTRAINTS(20)
#define FI_CONSTRAINTS_32 \
  FI_CONSTRAINTS_16, FI_CONSTRAINTS(16), FI_CONSTRAINTS(20), FI_CONSTRAINTS(24), FI_CONSTRAINTS(28)
#define FI_CONSTRAINTS_40 FI_CONSTRAINTS_32, FI_CONSTRAINTS(32), FI_CONSTRAINTS(36)
#define FI_CONSTRAINTS_48 FI_CONSTRAINTS_40, FI_CONSTRAINTS(40), FI_CONSTRAINTS(44)
#define FI_CONSTRAINTS_56 FI_CONSTRAINTS_48, FI_CONSTRAINTS(48), FI_CONSTRAINTS(52)
#define FI_CONSTRAINTS_64 FI_CONSTRAINTS_56, FI_CONSTRAINTS(56), FI_CONSTRAINTS(60)
#define FI_CONSTRAINTS_68 FI_CONSTRAINTS_64, FI_CONSTRAINTS(64)
#define FI_CONSTRAINTS_80 \
  FI_CONSTRAINTS_64, FI_CONSTRAINTS(64), FI_CONSTRAINTS(68), FI_CONSTRAINTS(72), FI_CONSTRAINTS(76)
#define FI_CONSTRAINTS_88 FI_CONSTRAINTS_80, FI_CONSTRAINTS(80), FI_CONSTRAINTS(84)
#define FI_CONSTRAINTS_96 FI_CONSTRAINTS_88, FI_CONSTRAINTS(88), FI_CONSTRAINTS(92)
#define FI_CONSTRAINTS_104 FI_CONSTRAINTS_96, FI_CONSTRAINTS(96), FI_CONSTRAINTS(100)
#define FI_CONSTRAINTS_128                                                                                \
  FI_CONSTRAINTS_104, FI_CONSTRAINTS(104), FI_CONSTRAINTS(108), FI_CONSTRAINTS(112), FI_CONSTRAINTS(116), \
      FI_CONSTRAINTS(120), FI_CONSTRAINTS(124)

// wgmma: d = a b, or d += a b if `add`. With a in shared memory, K-major, b there is K-major too, unless kMnMajorB
// (only 16-bit operands can be MN-major). With a in registers, as four packed pairs of mma.m16n8k16 or four quadruples
// of mma.m16n8k32, b of 16 bits is MN-major unless kMnMajorB is false, and b of 8 bits is K-major. The operands after
// the `count` accumulators have the numbers x0, x1, ...
#define FI_WGMMA_TEXT(x_add, shape, types, count, a, x_b, orders)                                       \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #x_add ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
  " {" FI_ACCUMULATORS_##count "}, " a ", %" #x_b ", p, 1, 1" orders ";\n}"
#define FI_WGMMA_SHARED_16(n, count, x0, x1, x2, x3, x4, name, type)                                            \
  template <bool kMnMajorB = false, bool kMnMajorA = false>                                                     \
  FI_DEVICE void wgmma(float (&d)[count], uint64_t a, uint64_t b, bool add, type, type) {                       \
    asm volatile(FI_WGMMA_TEXT(x2, "m64n" #n "k16", name "." name, count, "%" #x0, x1, ", %" #x4 ", %" #x3)     \
                 : FI_CONSTRAINTS_##count                                                                       \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMnMajorB ? 1 : 0), "n"(kMnMajorA ? 1 : 0)); \
  }
#define FI_WGMMA_SHARED_8(n, count, x0, x1, x2, names, type_a, type_b)                        \
  template <bool kMnMajorB = false>                                                           \
  FI_DEVICE void wgmma(float (&d)[count], uint64_t a, uint64_t b, bool add, type_a, type_b) { \
    static_assert(!kMnMajorB, "fp8 operands are K-major");                                    \
    asm volatile(FI_WGMMA_TEXT(x2, "m64n" #n "k32", names, count, "%" #x0, x1, "")            \
                 : FI_CONSTRAINTS_##count                                                     \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                               \
  }
#define FI_WGMMA_REGISTERS_16(n, count, x0, x1, x2, x3, x4, x5, x6, name, type)                                       \
  template <bool kMnMajorB = true>                                                                                    \
  FI_DEVICE void wgmma(float (&d)[count], const unsigned (&a)[4], uint64_t b, bool add, type, type) {                 \
    asm volatile(FI_WGMMA_TEXT(x5, "m64n" #n "k16", name "." name, count, "{%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}", \
                               x4, ", %" #x6)                                                                         \
                 : FI_CONSTRAINTS_##count                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                    \
                   "n"(kMnMajorB ? 1 : 0));                                                                           \
  }
#define FI_WGMMA_REGISTERS_8(n, count, x0, x1, x2, x3, x4, x5, names, type_a, type_b)                                 \
  FI_DEVICE void wgmma(float (&d)[count], const unsigned (&a)[4], uint64_t b, bool add, type_a, type_b) {             \
    asm volatile(FI_WGMMA_TEXT(x5, "m64n" #n "k32", names, count, "{%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}", x4, "") \
                 : FI_CONSTRAINTS_##count                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                   \
  }
#define FI_WGMMA(n, count, x0, x1, x2, x3, x4, x5, x6)                                              \
  FI_WGMMA_SHARED_16(n, count, x0, x1, x2, x3, x4, "f16", __half)                                   \
  FI_WGMMA_SHARED_16(n, count, x0, x1, x2, x3, x4, "bf16", __nv_bfloat16)                           \
  FI_WGMMA_SHARED_8(n, count, x0, x1, x2, "e4m3.e4m3", __nv_fp8_e4m3, __nv_fp8_e4m3)                \
  FI_WGMMA_SHARED_8(n, count, x0, x1, x2, "e4m3.e5m2", __nv_fp8_e4m3, __nv_fp8_e5m2)                \
  FI_WGMMA_SHARED_8(n, count, x0, x1, x2, "e5m2.e4m3", __nv_fp8_e5m2, __nv_fp8_e4m3)                \
  FI_WGMMA_SHARED_8(n, count, x0, x1, x2, "e5m2.e5m2", __nv_fp8_e5m2, __nv_fp8_e5m2)                \
  FI_WGMMA_REGISTERS_16(n, count, x0, x1, x2, x3, x4, x5, x6, "f16", __half)                        \
  FI_WGMMA_REGISTERS_16(n, count, x0, x1, x2, x3, x4, x5, x6, "bf16", __nv_bfloat16)                \
  FI_WGMMA_REGISTERS_8(n, count, x0, x1, x2, x3, x4, x5, "e4m3.e4m3", __nv_fp8_e4m3, __nv_fp8_e4m3) \
  FI_WGMMA_REGISTERS_8(n, count, x0, x1, x2, x3, x4, x5, "e4m3.e5m2", __nv_fp8_e4m3, __nv_fp8_e5m2)
FI_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
FI_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
FI_WGMMA(24, 12, 12, 13, 14, 15, 16, 17, 18)
FI_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
FI_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
FI_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
FI_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
FI_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
FI_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
FI_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
FI_WGMMA(136, 68, 68, 69, 70, 71, 72, 73, 74)
FI_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
FI_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
FI_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
FI_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
FI_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef FI_ACCUMULATORS_4
#undef FI_ACCUMULATORS_8
#undef FI_ACCUMULATORS_12
#undef FI_ACCUMULATORS_16
#undef FI_ACCUMULATORS_24
#undef FI_ACCUMULATORS_32
#undef FI_ACCUMULATORS_40
#undef FI_ACCUMULATORS_48
#undef FI_ACCUMULATORS_56
#undef FI_ACCUMULATORS_64
#undef FI_ACCUMULATORS_68
#undef FI_ACCUMULATORS_80
#undef FI_ACCUMULATORS_88
#undef FI_ACCUMULATORS_96
#undef FI_ACCUMULATORS_104
#undef FI_ACCUMULATORS_128
#undef FI_CONSTRAINTS
#undef FI_CONSTRAINTS_4
#undef FI_CONSTRAINTS_8
#undef FI_CONSTRAINTS_12
#undef FI_CONSTRAINTS_16
#undef FI_CONSTRAINTS_24
#undef FI_CONSTRAINTS_32
#undef FI_CONSTRAINTS_40
#undef FI_CONSTRAINTS_48
#undef FI_CONSTRAINTS_56
#undef FI_CONSTRAINTS_64
#undef FI_CONSTRAINTS_68
#undef FI_CONSTRAINTS_80
#undef FI_CONSTRAINTS_88
#undef FI_CONSTRAINTS_96
#undef FI_CONSTRAINTS_104
#undef FI_CONSTRAINTS_128
#undef FI_WGMMA_TEXT
#undef FI_WGMMA_SHARED_16
#undef FI_WGMMA_SHARED_8
#undef FI_WGMMA_REGISTERS_16
#undef FI_WGMMA_REGISTERS_8
#undef FI_WGMMA

}  // namespace fi
