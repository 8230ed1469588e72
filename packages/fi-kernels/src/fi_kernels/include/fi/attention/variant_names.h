// The names that a user's attention variant is written with, those of FlashInfer's: base struct, hooks, math.
// One text serves CUDA and the CPU, where the qualifiers of functions mean nothing.
#pragma once
#include "fi/attention/softmax.h"

#if defined(__CUDACC__)
#include "fi/cuda/math.cuh"
#define FI_VARIANT_CODE __device__ __forceinline__
#else
#include <algorithm>
#include <cmath>

#include "fi/cpu/math.h"
#define FI_VARIANT_CODE inline
#define __host__
#define __device__
#define __forceinline__ inline
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __ldg(p) (*(p))
#endif

#define FI_UNUSED_INDEX(name) [[maybe_unused]] uint32_t name

// Each defines a member function of the variant; the last argument is its body, in braces.
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...)       \
  template <typename Params, typename T>                                                                          \
  FI_VARIANT_CODE T LogitsTransform([[maybe_unused]] const Params& params, [[maybe_unused]] T logits,             \
                                    FI_UNUSED_INDEX(batch_idx), FI_UNUSED_INDEX(qo_idx), FI_UNUSED_INDEX(kv_idx), \
                                    FI_UNUSED_INDEX(qo_head_idx), FI_UNUSED_INDEX(kv_head_idx)) {                 \
    __VA_ARGS__                                                                                                   \
  }
#define REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...)                    \
  template <typename Params>                                                                                      \
  FI_VARIANT_CODE bool LogitsMask([[maybe_unused]] const Params& params, FI_UNUSED_INDEX(batch_idx),              \
                                  FI_UNUSED_INDEX(qo_idx), FI_UNUSED_INDEX(kv_idx), FI_UNUSED_INDEX(qo_head_idx), \
                                  FI_UNUSED_INDEX(kv_head_idx)) {                                                 \
    __VA_ARGS__                                                                                                   \
  }
#define REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, ...)                               \
  template <typename Params, typename T>                                                                      \
  FI_VARIANT_CODE void update_m_d([[maybe_unused]] const Params& params, FI_UNUSED_INDEX(kv_tile_idx),        \
                                  FI_UNUSED_INDEX(qo_head_idx), [[maybe_unused]] T& m, [[maybe_unused]] T& d, \
                                  [[maybe_unused]] T& scale) {                                                \
    __VA_ARGS__                                                                                               \
  }
#define REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, ...)                    \
  template <typename Params, typename T>                                                                               \
  FI_VARIANT_CODE T OutputTransform([[maybe_unused]] const Params& params, [[maybe_unused]] T output,                  \
                                    FI_UNUSED_INDEX(batch_idx), FI_UNUSED_INDEX(qo_idx), FI_UNUSED_INDEX(qo_head_idx), \
                                    [[maybe_unused]] T m, [[maybe_unused]] T d, [[maybe_unused]] T scale) {            \
    __VA_ARGS__                                                                                                        \
  }
#define REGISTER_QUERY_TRANSFORM(params, q, ...) \
  static_assert(sizeof(#q) == 0, "REGISTER_QUERY_TRANSFORM is not supported: transform q before the call");
#define REGISTER_KEY_TRANSFORM(params, k, ...)                                                 \
  static_assert(sizeof(#k) == 0,                                                               \
                "REGISTER_KEY_TRANSFORM is not supported: transform the keys before they are " \
                "stored");

namespace flashinfer {

using fi::int16_t, fi::int32_t, fi::int64_t, fi::int8_t;
using fi::uint16_t, fi::uint32_t, fi::uint64_t, fi::uint8_t;

namespace math {

constexpr float log2e = fi::kLog2e, loge2 = 0.6931471805599453f, inf = -fi::kMinusInf;

#if defined(__CUDACC__)
using Functions = fi::CudaMath;
FI_VARIANT_CODE float ptx_rcp(float x) { return fi::reciprocal_approx(x); }
#else
using Functions = fi::CpuMath;
FI_VARIANT_CODE float ptx_rcp(float x) { return 1.f / x; }
#endif
FI_VARIANT_CODE float ptx_exp2(float x) { return Functions::exp2(x); }
FI_VARIANT_CODE float ptx_log2(float x) { return Functions::log2(x); }
FI_VARIANT_CODE float tanh(float x) { return Functions::tanh(x); }

}  // namespace math

#if !defined(__CUDACC__)
using std::max, std::min;
#endif

template <class Params>
FI_VARIANT_CODE auto declared_v_scale(const Params& params, int) -> decltype(static_cast<float>(params.v_scale)) {
  return static_cast<float>(params.v_scale);
}
template <class Params>
FI_VARIANT_CODE float declared_v_scale(const Params&, long) {
  return 1.f;
}

// What a variant inherits where it says nothing. It declares itself: a constructor template
// (const Params& params, uint32_t batch_idx, uint8_t* smem_ptr), uint32_t window_left, qo_len, kv_len, and with a
// softmax float sm_scale_log2, which multiplies logits. Without (use_softmax = false) logits are the weights.
struct AttentionVariantBase {
  static constexpr bool use_softmax = true;

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, { return logits; })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, { return true; })
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {})
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale,
                            { return m == -math::inf || d == 0.f ? 0.f : output / d * declared_v_scale(params, 0); })
};

}  // namespace flashinfer
