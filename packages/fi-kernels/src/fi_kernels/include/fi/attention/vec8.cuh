// Vec8 consecutive elements of a row of q, k or v: the unit in which the attention kernels read; and output by dtype.
#pragma once
#include "fi/attention/problem.h"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/quantization/e2m1.cuh"

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

// Whether an element takes four bits: two share a byte, and 16 a scale.
template <class T>
constexpr bool kIsE2m1 = kIsSame<T, E2m1>;

FI_DEVICE float e4m3_to_float(uint8_t bits) {
  __nv_fp8_e4m3 x;
  x.__x = bits;
  return to_float(x);
}

template <>
struct Vec8<E2m1> {
  uint32_t codes;
  uint32_t scale;  // e4m3

  FI_DEVICE void clear() { codes = scale = 0; }
  // p: the eight elements; scale_of: their scale.
  FI_DEVICE void read(const E2m1* p, const uint8_t* scale_of, bool aligned) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(p);
    codes = aligned ? *reinterpret_cast<const uint32_t*>(bytes)
                    : bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
    scale = *scale_of;
  }
  FI_DEVICE void floats(float* f) const {
    const float factor = e4m3_to_float(static_cast<uint8_t>(scale));
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = e2m1_to_float(codes >> 4 * i & 15) * factor;
  }
};

// The eight elements as pairs of T, which holds them exactly.
FI_DEVICE uint4 pairs_of(const Vec8<E2m1>& x, __half) {
  unsigned y[4];
  e2m1_halves(x.codes, y);
  const unsigned scale = halves(x.scale * 0x101u, __nv_fp8_e4m3{});
#pragma unroll
  for (unsigned& pair : y)  // in two steps: 2^14 times a scale may be too large
    asm("{\n.reg .b32 x;\nmul.rn.f16x2 x, %0, %1;\nmul.rn.f16x2 %0, x, %2;\n}"
        : "+r"(pair)
        : "r"(scale), "r"(0x74007400u));
  return make_uint4(__byte_perm(y[0], y[1], 0x5410), __byte_perm(y[2], y[3], 0x5410), __byte_perm(y[0], y[1], 0x7632),
                    __byte_perm(y[2], y[3], 0x7632));
}
FI_DEVICE uint4 pairs_of(const Vec8<E2m1>& x, __nv_bfloat16) {
  const uint4 y = pairs_of(x, __half{});
  const auto to_bf16 = [](unsigned pair) {
    const float2 z = __half22float2(reinterpret_cast<const __half2&>(pair));
    return pack_pair(z.x, z.y, __nv_bfloat16{});
  };
  return make_uint4(to_bf16(y.x), to_bf16(y.y), to_bf16(y.z), to_bf16(y.w));
}

// Element d of a row of keys or values; scales: of the row, if it has any.
template <class KV>
FI_DEVICE float kv_element(const KV* row, const uint8_t* scales, int d) {
  if constexpr (kIsE2m1<KV>)
    return e2m1_to_float(reinterpret_cast<const uint8_t*>(row)[d / 2] >> d % 2 * 4 & 15) *
           e4m3_to_float(scales[d / 16]);
  else
    return to_float(row[d]);
}

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
