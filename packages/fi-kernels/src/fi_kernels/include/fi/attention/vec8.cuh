// Vec8 consecutive elements of a row of q, k or v: the unit in which the attention kernels read; and output by dtype.
#pragma once
#include "fi/attention/problem.h"
#include "fi/cuda/vec.cuh"

namespace fi {

template <class T>
struct Vec8 {
  static constexpr int kVec = sizeof(T) >= 2 ? 16 / sizeof(T) : 8;  // elements of one load of at most 16 bytes
  Vec<T, kVec> part[8 / kVec];

  FI_DEVICE void clear() {
    unsigned* words = reinterpret_cast<unsigned*>(this);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(*this) / 4); ++i) words[i] = 0;
  }
  // aligned: p is aligned for the vector loads, else single elements are read.
  FI_DEVICE void read(const T* p, bool aligned) {
#pragma unroll
    for (int i = 0; i < 8 / kVec; ++i) {
      if (aligned) {
        part[i] = load<T, kVec>(p + i * kVec);
      } else {
#pragma unroll
        for (int j = 0; j < kVec; ++j) part[i].v[j] = p[i * kVec + j];
      }
    }
  }
  FI_DEVICE void floats(float* f) const {
#pragma unroll
    for (int i = 0; i < 8 / kVec; ++i) {
      float x[kVec];
      to_float(part[i], x);
#pragma unroll
      for (int j = 0; j < kVec; ++j) f[i * kVec + j] = x[j];
    }
  }
};

FI_DEVICE void store_output(void* out, OutType type, int64_t index, float x) {
  switch (type) {
    case OutType::kF16:
      static_cast<__half*>(out)[index] = from_float<__half>(x);
      break;
    case OutType::kBF16:
      static_cast<__nv_bfloat16*>(out)[index] = from_float<__nv_bfloat16>(x);
      break;
    case OutType::kF32:
      static_cast<float*>(out)[index] = x;
      break;
    case OutType::kE4M3:
      static_cast<__nv_fp8_e4m3*>(out)[index] = from_float<__nv_fp8_e4m3>(x);
      break;
    case OutType::kE5M2:
      static_cast<__nv_fp8_e5m2*>(out)[index] = from_float<__nv_fp8_e5m2>(x);
      break;
  }
}

template <class T>
FI_DEVICE void store_elements(T* to, const Vec<T, 4>& v, bool aligned) {
  if (aligned) return store(to, v);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = v.v[i];
}

// Four consecutive elements. aligned: as one vector.
FI_DEVICE void store_four(void* out, OutType type, int64_t index, float4 x, bool aligned) {
  const float f[4] = {x.x, x.y, x.z, x.w};
  if (type == OutType::kF32) {
    store_elements(static_cast<float*>(out) + index, *reinterpret_cast<const Vec<float, 4>*>(f), aligned);
  } else if (type == OutType::kF16) {
    Vec<__half, 4> v;
    from_float(f, v);
    store_elements(static_cast<__half*>(out) + index, v, aligned);
  } else if (type == OutType::kBF16) {
    Vec<__nv_bfloat16, 4> v;
    from_float(f, v);
    store_elements(static_cast<__nv_bfloat16*>(out) + index, v, aligned);
  } else {
    Vec<__nv_fp8_e4m3, 4> v;  // or e5m2, which is as long
    fp8_from_float(f, v, type == OutType::kE4M3 ? __NV_E4M3 : __NV_E5M2);
    store_elements(static_cast<__nv_fp8_e4m3*>(out) + index, v, aligned);
  }
}

}  // namespace fi
