// wgmma (PTX ISA 9.7.15) with both operands in shared memory, of any pair of types that GEMM multiplies: 64 x N x 16 on
// 16-bit operands, 64 x N x 32 on fp8. Accumulators are placed as in wgmma_sm90.cuh.
#pragma once
#include "fi/cuda/ptx/wgmma_sm90.cuh"

namespace fi {

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
#define FI_NAMES_UP_TO_40 FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32
#define FI_REGISTERS_UP_TO_40 FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32)
#define FI_NAMES_UP_TO_48 FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40
#define FI_REGISTERS_UP_TO_48 \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40)
#define FI_NAMES_UP_TO_64                                                                                         \
  FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40 ", " FI_NAMES_48 \
             ", " FI_NAMES_56
#define FI_REGISTERS_UP_TO_64                                                                               \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40), \
      FI_REGISTERS(48), FI_REGISTERS(56)
#define FI_NAMES_UP_TO_80                                                                                         \
  FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40 ", " FI_NAMES_48 \
             ", " FI_NAMES_56 ", " FI_NAMES_64 ", " FI_NAMES_72
#define FI_REGISTERS_UP_TO_80                                                                               \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40), \
      FI_REGISTERS(48), FI_REGISTERS(56), FI_REGISTERS(64), FI_REGISTERS(72)
#define FI_NAMES_UP_TO_88                                                                                         \
  FI_NAMES_0 ", " FI_NAMES_8 ", " FI_NAMES_16 ", " FI_NAMES_24 ", " FI_NAMES_32 ", " FI_NAMES_40 ", " FI_NAMES_48 \
             ", " FI_NAMES_56 ", " FI_NAMES_64 ", " FI_NAMES_72 ", " FI_NAMES_80
#define FI_REGISTERS_UP_TO_88                                                                               \
  FI_REGISTERS(0), FI_REGISTERS(8), FI_REGISTERS(16), FI_REGISTERS(24), FI_REGISTERS(32), FI_REGISTERS(40), \
      FI_REGISTERS(48), FI_REGISTERS(56), FI_REGISTERS(64), FI_REGISTERS(72), FI_REGISTERS(80)
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

// d = a b, or d += a b if `add`. a is K-major; so is b, unless kColumnsOfB: then it is MN-major (16-bit operands only).
// The operands after the `count` accumulators have the numbers x0 to x3.
#define FI_WGMMA_16(n, count, x0, x1, x2, x3, name, type)                                                              \
  template <bool kColumnsOfB>                                                                                          \
  FI_DEVICE void wgmma_shared_step(float (&d)[count], uint64_t a, uint64_t b, bool add, type, type) {                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name \
                 "." name " {" FI_NAMES_UP_TO_##count "}, %" #x0 ", %" #x1 ", p, 1, 1, 0, %" #x3 ";\n}"                \
                 : FI_REGISTERS_UP_TO_##count                                                                          \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kColumnsOfB ? 1 : 0));                              \
  }
#define FI_WGMMA_8(n, count, x0, x1, x2, names, type_a, type_b)                                           \
  template <bool kColumnsOfB>                                                                             \
  FI_DEVICE void wgmma_shared_step(float (&d)[count], uint64_t a, uint64_t b, bool add, type_a, type_b) { \
    static_assert(!kColumnsOfB, "fp8 operands are K-major");                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n    \
                 "k32.f32." names " {" FI_NAMES_UP_TO_##count "}, %" #x0 ", %" #x1 ", p, 1, 1;\n}"        \
                 : FI_REGISTERS_UP_TO_##count                                                             \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
  }
#define FI_WGMMA(n, count, x0, x1, x2, x3)                                    \
  FI_WGMMA_16(n, count, x0, x1, x2, x3, "f16", __half)                        \
  FI_WGMMA_16(n, count, x0, x1, x2, x3, "bf16", __nv_bfloat16)                \
  FI_WGMMA_8(n, count, x0, x1, x2, "e4m3.e4m3", __nv_fp8_e4m3, __nv_fp8_e4m3) \
  FI_WGMMA_8(n, count, x0, x1, x2, "e4m3.e5m2", __nv_fp8_e4m3, __nv_fp8_e5m2) \
  FI_WGMMA_8(n, count, x0, x1, x2, "e5m2.e4m3", __nv_fp8_e5m2, __nv_fp8_e4m3)
FI_WGMMA(64, 32, 32, 33, 34, 35)
FI_WGMMA(80, 40, 40, 41, 42, 43)
FI_WGMMA(96, 48, 48, 49, 50, 51)
FI_WGMMA(128, 64, 64, 65, 66, 67)
FI_WGMMA(160, 80, 80, 81, 82, 83)
FI_WGMMA(176, 88, 88, 89, 90, 91)
FI_WGMMA(192, 96, 96, 97, 98, 99)
FI_WGMMA(256, 128, 128, 129, 130, 131)

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
#undef FI_NAMES_UP_TO_64
#undef FI_REGISTERS_UP_TO_64
#undef FI_NAMES_UP_TO_80
#undef FI_REGISTERS_UP_TO_80
#undef FI_NAMES_UP_TO_88
#undef FI_REGISTERS_UP_TO_88
#undef FI_NAMES_UP_TO_96
#undef FI_REGISTERS_UP_TO_96
#undef FI_NAMES_UP_TO_128
#undef FI_REGISTERS_UP_TO_128
#undef FI_WGMMA
#undef FI_WGMMA_16
#undef FI_WGMMA_8

}  // namespace fi
