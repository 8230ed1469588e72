// What both rope ops end in: the launch of the kernel whose vectors fit, or the CPU loop over rows and heads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "fi/host/kernel.h"
#include "fi/host/tensor.h"
#include "fi/rope/rope.h"

#if FI_CUDA
#include "fi/divisor.h"
#else
#include <cmath>
#include <cstring>
#include <vector>

#include "fi/cpu/parallel.h"
#include "fi/cpu/rows.h"
#endif

namespace fi {

inline Index index_of(const Tensor& t) { return {t.data(), t.dtype() == kI64}; }

#if FI_CUDA
namespace detail {

// The most elements (a power of two) of which a vector may have, so that every address and width is a multiple of it.
inline int64_t widest_vector(const RopeRows& p, int64_t bytes, int64_t out_bytes) {
  int64_t bits = 16 / bytes;
  const auto address = [](const void* at, int64_t size) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at)) / size;
  };
  const auto add = [&](const RopePart& part, int32_t heads, int32_t width) {
    if (heads == 0 || width == 0) return;
    bits |= address(part.in, bytes) | part.in_row | part.in_head | address(part.out, out_bytes) | part.out_row |
            part.out_head | part.out_page | width;
  };
  for (int kind : {kRopeQ, kRopeK}) add(p.rotated[kind], p.heads[kind], p.rotary_dim / 2);
  for (int kind : {kRopeQ, kRopeK, kRopeV}) add(p.rest[kind], p.heads[kind], p.rest_dim[kind]);
  if (p.cos_sin) bits |= 2 * address(p.cos_sin, sizeof(float)) | 2 * p.cos_sin_row;  // read by half vectors
  return bits & -bits;
}

}  // namespace detail

// Entries in order of preference; config = {vector elements, interleaved, most heads a thread, threads wanted per SM}.
// With few rows a thread takes fewer heads, down to one, until there are as many threads as wanted.
template <class Params>
void run_rope(const Kernel& kernel, Params& params, DType in, DType out, bool interleave, DLDevice device, bool pdl) {
  RopeRows& p = params.rows;
  const int64_t widest = detail::widest_vector(p, in.bytes(), out.bytes());
  const int64_t heads = int64_t{p.heads[kRopeQ]} + p.heads[kRopeK] + p.heads[kRopeV];
  const int64_t rest = std::max(p.heads[kRopeQ] ? p.rest_dim[kRopeQ] : 0, p.heads[kRopeK] ? p.rest_dim[kRopeK] : 0);
  for (const Entry& entry : kernel.entries) {
    const int64_t vec = entry.config[0], most = entry.config[2], wanted = entry.config[3];
    if (vec > widest || (entry.config[1] != 0) != interleave) continue;
    const auto pairs_of = [vec](int64_t width) { return (width + 2 * vec - 1) / (2 * vec); };
    const int64_t lanes =
        std::max(pairs_of(p.rotary_dim) + pairs_of(rest), p.heads[kRopeV] ? pairs_of(p.rest_dim[kRopeV]) : 0);
    const int64_t threads = Kernel::multiprocessors(device) * wanted, all = p.rows * lanes;
    const int64_t each = std::clamp<int64_t>((all * heads + threads - 1) / threads, 1, std::min(most, heads));
    int64_t groups = (heads + each - 1) / each;
    const int64_t limit = 0x7fffffff - entry.threads;  // of threads: indices have 31 bits
    if (all * groups > limit) groups = limit / all;
    FI_CHECK(groups > 0, ValueError, "too large for one launch: %lld rows of %lld elements",
             static_cast<long long>(p.rows), static_cast<long long>(p.rotary_dim + rest));
    p.lanes = divisor(static_cast<uint32_t>(lanes));
    p.lanes_and_groups = divisor(static_cast<uint32_t>(lanes * groups));
    p.groups = static_cast<int32_t>(groups);
    Launch config{(all * groups + entry.threads - 1) / entry.threads};
    config.pdl = pdl;
    return kernel.launch(entry, config, device, params);
  }
  raise("RuntimeError", "no entry for vectors of %lld elements", static_cast<long long>(widest));
}
#else
namespace detail {

FI_CLONES inline void rotate_halves(float* x, const float* cosine, const float* sine, int32_t half) {
#pragma omp simd
  for (int32_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}
FI_CLONES inline void rotate_neighbours(float* x, const float* cosine, const float* sine, int32_t half) {
#pragma omp simd
  for (int32_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cosine[i] - b * sine[i];
    x[2 * i + 1] = b * cosine[i] + a * sine[i];
  }
}
FI_CLONES inline void scale_row(float* x, float scale, int32_t n) {
#pragma omp simd
  for (int32_t i = 0; i < n; ++i) x[i] *= scale;
}
FI_CLONES inline void angles_of(const uint64_t* step, int64_t position, float* cosine, float* sine, int32_t n) {
#pragma omp simd
  for (int32_t i = 0; i < n; ++i)
    cos_sin_of_turn(static_cast<uint32_t>(static_cast<uint64_t>(position) * step[i] >> 32), &cosine[i], &sine[i]);
}

}  // namespace detail

// angles(row, cosine, sine) fills the angles of a row; place(kind, part, row) gives the offset of a row in part.out, or
// -1 where it has no place.
template <class Angles, class Place>
void run_rope(const RopeRows& p, DType in, DType out, bool interleave, const Angles& angles, const Place& place) {
  const cpu::LoadRow load = cpu::row_loader(in);
  const cpu::StoreRow store = cpu::row_storer(out);
  const int32_t half = p.rotary_dim / 2, widest = std::max({p.rotary_dim, p.rest_dim[0], p.rest_dim[1], p.rest_dim[2]});
  int64_t elements = 1;
  for (int kind : {kRopeQ, kRopeK, kRopeV})
    elements += int64_t{p.heads[kind]} * (p.rest_dim[kind] + (kind == kRopeV ? 0 : p.rotary_dim));
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / elements), [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(widest)), cosine(static_cast<size_t>(half)),
        sine(static_cast<size_t>(half));
    const auto convert = [&](const RopePart& part, int kind, int32_t width, int64_t row, bool rotated) {
      const int64_t to = width ? place(kind, part, row) : -1;
      if (to < 0) return;
      for (int64_t head = 0; head < p.heads[kind]; ++head) {
        load(static_cast<const char*>(part.in) + (row * part.in_row + head * part.in_head) * in.bytes(), x.data(),
             width);
        if (rotated)
          (interleave ? detail::rotate_neighbours : detail::rotate_halves)(x.data(), cosine.data(), sine.data(), half);
        if (out.bits == 8) detail::scale_row(x.data(), p.scale[kind], width);
        store(x.data(), static_cast<char*>(part.out) + (to + head * part.out_head) * out.bytes(), width);
      }
    };
    for (int64_t row = begin; row < end; ++row) {
      angles(row, cosine.data(), sine.data());
      for (int kind : {kRopeQ, kRopeK}) convert(p.rotated[kind], kind, p.rotary_dim, row, true);
      for (int kind : {kRopeQ, kRopeK, kRopeV}) convert(p.rest[kind], kind, p.rest_dim[kind], row, false);
    }
  });
}

// From the table; a position outside it gives NaN.
inline void table_angles(const RopeRows& p, int64_t position, float* cosine, float* sine) {
  const int32_t half = p.rotary_dim / 2;
  if (position < 0 || position >= p.max_pos) {
    std::fill_n(cosine, half, NAN);
    std::fill_n(sine, half, NAN);
    return;
  }
  const float* row = p.cos_sin + position * p.cos_sin_row;
  std::copy_n(row, half, cosine);
  std::copy_n(row + half, half, sine);
}
#endif

}  // namespace fi
