// Chooses the kernel entry and the grid of rope and rope_quantize.
#pragma once
#include <algorithm>
#include <cstdint>

#include "fi/divisor.h"
#include "fi/host/kernel.h"
#include "fi/host/tensor.h"
#include "fi/rope/rope.h"

namespace fi {

inline IndexArray index_array(const Tensor& t) { return {t.data(), t.dtype() == kI64}; }

#if FI_CUDA
namespace detail {

// The widest vector in elements (a power of two) that all addresses, strides and widths are multiples of.
inline int64_t max_vec_size(const RopeCommon& p, int64_t bytes, int64_t out_bytes) {
  int64_t bits = 16 / bytes;
  const auto address = [](const void* pointer, int64_t size) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)) / size;
  };
  const auto add = [&](const RopeOperand& operand, int32_t heads, int32_t width) {
    if (heads == 0 || width == 0) return;
    bits |= address(operand.in, bytes) | operand.in_row_stride | operand.in_head_stride |
            address(operand.out, out_bytes) | operand.out_row_stride | operand.out_head_stride |
            operand.out_page_stride | width;
  };
  for (int kind : {kRopeQ, kRopeK}) add(p.rope[kind], p.heads[kind], p.rotary_dim / 2);
  for (int kind : {kRopeQ, kRopeK, kRopeV}) add(p.nope[kind], p.heads[kind], p.nope_dim[kind]);
  if (p.cos_sin) bits |= 2 * address(p.cos_sin, sizeof(float)) | 2 * p.cos_sin_stride;  // read by half vectors
  return bits & -bits;
}

}  // namespace detail

// `lanes` threads work on a head, and on as many heads in parallel.
struct RopeTile {
  const Entry& entry;
  int64_t lanes, parallel_heads;
};

// Entries are in order of preference; Config is the op's. With few rows, a thread processes fewer heads (at least one)
// until the grid has the wanted threads per SM.
template <class Config>
RopeTile tile(const Kernel& kernel, const RopeCommon& p, int64_t max_vec, bool interleave, DLDevice device) {
  const Entry& entry = kernel.first_entry([&](const Entry& candidate) {
    const auto config = Config::of(candidate);
    return config.vec_size <= max_vec && (config.interleaved != 0) == interleave;
  });
  const auto config = Config::of(entry);
  const auto lanes_of = [&](int64_t width) { return (width + 2 * config.vec_size - 1) / (2 * config.vec_size); };
  const int64_t heads = int64_t{p.heads[kRopeQ]} + p.heads[kRopeK] + p.heads[kRopeV];
  const int64_t nope_dim = std::max(p.heads[kRopeQ] ? p.nope_dim[kRopeQ] : 0, p.heads[kRopeK] ? p.nope_dim[kRopeK] : 0);
  const int64_t lanes =
      std::max(lanes_of(p.rotary_dim) + lanes_of(nope_dim), p.heads[kRopeV] ? lanes_of(p.nope_dim[kRopeV]) : 0);
  const int64_t wanted_threads = kernel.multiprocessors(device) * config.threads_per_sm, row_lanes = p.rows * lanes;
  const int64_t heads_per_thread = std::clamp<int64_t>((row_lanes * heads + wanted_threads - 1) / wanted_threads, 1,
                                                       std::min(config.max_heads_per_thread, heads));
  const int64_t max_threads = 0x7fffffff - entry.threads;  // the kernel indexes threads with 31 bits
  const int64_t parallel_heads = std::min((heads + heads_per_thread - 1) / heads_per_thread, max_threads / row_lanes);
  FI_CHECK(parallel_heads > 0, ValueError, "too large for one launch: %lld rows of %lld elements",
           static_cast<long long>(p.rows), static_cast<long long>(p.rotary_dim + nope_dim));
  return {entry, lanes, parallel_heads};
}

template <class Config, class Params>
void launch_rope(const Kernel& kernel, Params& params, DType in, DType out, bool interleave, DLDevice device,
                 bool pdl) {
  RopeCommon& p = params.common;
  const int64_t max_vec = detail::max_vec_size(p, in.bytes(), out.bytes());
  const auto [entry, lanes, parallel_heads] = tile<Config>(kernel, p, max_vec, interleave, device);
  p.lanes = divisor(static_cast<uint32_t>(lanes));
  p.threads_per_row = divisor(static_cast<uint32_t>(lanes * parallel_heads));
  p.parallel_heads = static_cast<int32_t>(parallel_heads);
  Launch launch{(p.rows * lanes * parallel_heads + entry.threads - 1) / entry.threads};
  launch.pdl = pdl;
  kernel.launch(entry, launch, device, params);
}
#endif

}  // namespace fi
