// The CPU kernel of rope and rope_quantize: a loop over rows and heads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fi/cpu/parallel.h"
#include "fi/cpu/row_convert.h"
#include "fi/rope/rope.h"

namespace fi {
namespace detail {

FI_CLONES inline void rotate_halves(float* x, const float* cosine, const float* sine, int32_t half) {
#pragma omp simd
  for (int32_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}
FI_CLONES inline void rotate_interleaved(float* x, const float* cosine, const float* sine, int32_t half) {
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
FI_CLONES inline void compute_angles(const uint64_t* phase_step, int64_t position, float* cosine, float* sine,
                                     int32_t n) {
#pragma omp simd
  for (int32_t i = 0; i < n; ++i)
    cos_sin_of_phase(static_cast<uint32_t>(static_cast<uint64_t>(position) * phase_step[i] >> 32), &cosine[i],
                     &sine[i]);
}

}  // namespace detail

// Rotates and converts all rows. angles(row, cosine, sine) computes the angles of a row; row_offset(kind, operand, row)
// returns the offset of a row in operand.out, or -1 if the row is not written.
template <class Angles, class RowOffset>
void rope_cpu(const RopeCommon& p, DType in, DType out, bool interleave, const Angles& angles,
              const RowOffset& row_offset) {
  const cpu::LoadRow load = cpu::row_loader(in);
  const cpu::StoreRow store = cpu::row_storer(out);
  const int32_t half = p.rotary_dim / 2,
                max_width = std::max({p.rotary_dim, p.nope_dim[0], p.nope_dim[1], p.nope_dim[2]});
  int64_t elements = 1;
  for (int kind : {kRopeQ, kRopeK, kRopeV})
    elements += int64_t{p.heads[kind]} * (p.nope_dim[kind] + (kind == kRopeV ? 0 : p.rotary_dim));
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / elements), [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(max_width)), cosine(static_cast<size_t>(half)),
        sine(static_cast<size_t>(half)), weight[2], factor[2];
    const auto read = [&](const RopeOperand& operand, int32_t width, int64_t row, int64_t head) {
      load(static_cast<const char*>(operand.in) +
               (row * operand.in_row_stride + head * operand.in_head_stride) * in.bytes(),
           x.data(), width);
    };
    for (int kind : {kRopeQ, kRopeK}) {
      if (!p.weight[kind]) continue;
      weight[kind].resize(static_cast<size_t>(p.rotary_dim + p.nope_dim[kind]));
      load(p.weight[kind], weight[kind].data(), p.rotary_dim + p.nope_dim[kind]);
      factor[kind].resize(static_cast<size_t>(p.heads[kind]));
    }
    const auto measure = [&](int kind, int64_t row) {  // before a part of a head is written in place
      for (int64_t head = 0; head < p.heads[kind]; ++head) {
        float squares = 0.f;
        read(p.rope[kind], p.rotary_dim, row, head);
        for (int32_t i = 0; i < p.rotary_dim; ++i) squares += x[static_cast<size_t>(i)] * x[static_cast<size_t>(i)];
        read(p.nope[kind], p.nope_dim[kind], row, head);
        for (int32_t i = 0; i < p.nope_dim[kind]; ++i) squares += x[static_cast<size_t>(i)] * x[static_cast<size_t>(i)];
        factor[kind][static_cast<size_t>(head)] =
            1.f / std::sqrt(squares / static_cast<float>(p.rotary_dim + p.nope_dim[kind]) + p.eps);
      }
    };
    const auto convert = [&](const RopeOperand& operand, int kind, int32_t width, int64_t row, bool rotated) {
      const int64_t out_offset = width ? row_offset(kind, operand, row) : -1;
      if (out_offset < 0) return;
      for (int64_t head = 0; head < p.heads[kind]; ++head) {
        read(operand, width, row, head);
        if (kind != kRopeV && p.weight[kind])
          for (int32_t i = 0; i < width; ++i)
            x[static_cast<size_t>(i)] *= factor[kind][static_cast<size_t>(head)] *
                                         weight[kind][static_cast<size_t>(rotated ? i : p.rotary_dim + i)];
        if (rotated)
          (interleave ? detail::rotate_interleaved : detail::rotate_halves)(x.data(), cosine.data(), sine.data(), half);
        if (out.bits == 8) detail::scale_row(x.data(), p.scale[kind], width);
        store(x.data(), static_cast<char*>(operand.out) + (out_offset + head * operand.out_head_stride) * out.bytes(),
              width);
      }
    };
    for (int64_t row = begin; row < end; ++row) {
      angles(row, cosine.data(), sine.data());
      for (int kind : {kRopeQ, kRopeK})
        if (p.weight[kind]) measure(kind, row);
      for (int kind : {kRopeQ, kRopeK}) convert(p.rope[kind], kind, p.rotary_dim, row, true);
      for (int kind : {kRopeQ, kRopeK, kRopeV}) convert(p.nope[kind], kind, p.nope_dim[kind], row, false);
    }
  });
}

// Reads the angles of a position from the cos_sin cache; a position outside the cache gives NaN.
inline void cached_angles(const RopeCommon& p, int64_t position, float* cosine, float* sine) {
  const int32_t half = p.rotary_dim / 2;
  if (position < 0 || position >= p.max_pos) {
    std::fill_n(cosine, half, NAN);
    std::fill_n(sine, half, NAN);
    return;
  }
  const float* row = p.cos_sin + position * p.cos_sin_stride;
  std::copy_n(row, half, cosine);
  std::copy_n(row + half, half, sine);
}

}  // namespace fi
