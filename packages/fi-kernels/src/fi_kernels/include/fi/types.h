// Fixed-width integer types and FI_HOST_DEVICE for host compilers, nvcc and NVRTC; NVRTC has no standard headers.
#pragma once

// Marks small functions that launchers, CPU kernels and device code share.
#if defined(__CUDACC__)
#define FI_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FI_HOST_DEVICE inline
#endif

#if defined(__CUDACC_RTC__)
namespace fi {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
}  // namespace fi
#else
#include <stdint.h>
namespace fi {
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
}  // namespace fi
#endif
