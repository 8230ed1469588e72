// Makes a dtype or a block size that a call gives a template argument of a CPU kernel; the macros may be nested.
//
// DISPATCH_DTYPE(x.dtype(), T, { run<T>(...); }): T is the storage type ("fi/cpu/convert.h" has those of 16 and 8
// bits). DISPATCH_BLOCK_SIZE(block_size, kBlock, { run<kBlock>(...); }): 32, 64, 128, 256, 512 or 1024. A launcher of
// CUDA kernels does not instantiate them: it chooses one of `kernel.entries`.
#pragma once
#include "fi/cpu/convert.h"
#include "fi/host/tensor.h"

namespace fi::cpu {

template <class T>
struct Type {
  using type = T;
};
template <int n>
struct Constant {
  static constexpr int value = n;
};

template <class F>
void dispatch_dtype(DType dtype, const char* name, F&& body) {
  if (dtype == kF32) return body(Type<float>{});
  if (dtype == kF16) return body(Type<f16_t>{});
  if (dtype == kBF16) return body(Type<bf16_t>{});
  if (dtype == kE4M3) return body(Type<e4m3_t>{});
  if (dtype == kE5M2) return body(Type<e5m2_t>{});
  if (dtype == kI32) return body(Type<int32_t>{});
  if (dtype == kI64) return body(Type<int64_t>{});
  if (dtype == kU8) return body(Type<uint8_t>{});
  raise("TypeError", "%s: float32, float16, bfloat16, float8, int32, int64 or uint8 is required; got %s", name,
        dtype.str().c_str());
}

template <int n = 32, class F>
void dispatch_block_size(int64_t size, const char* name, F&& body) {
  if (size == n) return body(Constant<n>{});
  if constexpr (n < 1024)
    dispatch_block_size<2 * n>(size, name, body);
  else
    raise("ValueError", "%s: 32, 64, 128, 256, 512 or 1024 is required; got %lld", name, static_cast<long long>(size));
}

}  // namespace fi::cpu

#define DISPATCH_DTYPE(dtype, T, ...)                          \
  ::fi::cpu::dispatch_dtype(dtype, #dtype, [&](auto fi_type) { \
    using T = typename decltype(fi_type)::type;                \
    __VA_ARGS__                                                \
  })

#define DISPATCH_BLOCK_SIZE(size, NAME, ...)                      \
  ::fi::cpu::dispatch_block_size(size, #size, [&](auto fi_size) { \
    constexpr int NAME = decltype(fi_size)::value;                \
    __VA_ARGS__                                                   \
  })
