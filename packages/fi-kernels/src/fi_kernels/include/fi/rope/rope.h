// Parameters of the rope kernels, and the arithmetic of angles that the CPU and CUDA kernels share.
#pragma once
#include "fi/divisor.h"

namespace fi {

// An array of int32 or int64 indices; the kernels read either.
struct IndexArray {
  const void* data;
  int32_t is_int64;

  FI_HOST_DEVICE int64_t at(int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

enum RopeKind { kRopeQ = 0, kRopeK = 1, kRopeV = 2 };

// Input and output of one part of the heads: [rows, heads, width], strides in elements. In a paged cache out is
// [pages, slots, heads, width] and out_row_stride is the stride of a slot.
struct RopeOperand {
  const void* in;
  void* out;  // may be in
  int64_t in_row_stride, in_head_stride, out_row_stride, out_head_stride, out_page_stride;
};

// Parameters that rope and rope_quantize share. Heads of q and k have a rotated part (rope) and a part that is only
// converted (nope); v is all nope.
struct RopeCommon {
  RopeOperand rope[2], nope[3];
  int32_t heads[3], nope_dim[3];
  int32_t rotary_dim;
  float scale[3];  // factor before the cast to fp8; ignored for other outputs
  const void*
      weight[2];  // [rotary_dim + nope_dim], dtype of the rows: of the RMSNorm of each head of q and of k, or null
  float eps;
  int64_t rows;
  IndexArray pos_ids;
  const float* cos_sin;  // [max_pos, rotary_dim]: cosines, then sines; null: angles are computed
  int64_t cos_sin_stride, max_pos;
  // CUDA grid: `lanes` threads process a head, and `parallel_heads` heads of a row are processed at once.
  Divisor lanes, threads_per_row;  // threads_per_row = lanes * parallel_heads
  int32_t parallel_heads;
};

// Angles are phases: fractions of one revolution in 64-bit fixed point. position * phase_step modulo one revolution is
// then one integer product, exact for any position.
struct RopeFrequencies {
  static constexpr int kPowers = 10;  // pairs < 2^10
  double power[kPowers];              // theta^(-2 * 2^i / rotary_dim)
  double inverse_scale;
  // Llama 3.1: s = clamp(f * smooth_slope + smooth_offset, 0, 1); frequency f becomes s * f + (1 - s) * f / scale.
  double smooth_slope, smooth_offset;

  // Revolutions per position of a pair, before scaling.
  FI_HOST_DEVICE double revolutions(int32_t pair) const {
    double product = 0.15915494309189535;  // 1 / (2 pi)
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < kPowers; ++i)
      if (pair >> i & 1) product *= power[i];
    return product;
  }
  // The phase per position, after scaling.
  FI_HOST_DEVICE uint64_t phase_step(double revolutions) const {
    double s = revolutions * smooth_slope + smooth_offset;
    s = s < 0.0 ? 0.0 : s > 1.0 ? 1.0 : s;
    double scaled = revolutions * (inverse_scale + s * (1.0 - inverse_scale));
    if (scaled >= 1.0) scaled -= static_cast<double>(static_cast<int64_t>(scaled));
    return static_cast<uint64_t>(scaled * 0x1p64);
  }
};

struct RopeParams {
  RopeCommon common;
  RopeFrequencies frequencies;
  IndexArray indptr, offsets;  // read if pos_ids is null
  int64_t segments;
  // Places of k and v in a paged cache, page * page_size + token; below 0: none. Null: k is written by rows.
  IndexArray slots;
  Divisor page_size;

  // Where a row of a part of the heads is written, in operand.out; -1: nowhere.
  FI_HOST_DEVICE int64_t place(int kind, const RopeOperand& operand, int64_t row) const {
    if (kind == kRopeQ || !slots.data) return row * operand.out_row_stride;
    const int64_t slot = slots.at(row);
    if (slot < 0) return -1;
    const uint32_t page = divide(static_cast<uint32_t>(slot), page_size);
    return page * operand.out_page_stride + (slot - int64_t{page} * page_size.value) * operand.out_row_stride;
  }

  // Without pos_ids, row r of segment b has position offsets[b] + r - indptr[b]. A row outside all segments has
  // position 0, which rotates nothing.
  FI_HOST_DEVICE int64_t position(int64_t row) const {
    if (common.pos_ids.data) return common.pos_ids.at(row);
    int64_t low = 0, high = segments + 1;  // indptr[i] <= row for all i < low, > row for all i >= high
    while (low < high) {
      const int64_t middle = (low + high) >> 1;
      if (indptr.at(middle) <= row)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == 0 || low > segments) return 0;
    return static_cast<int64_t>(static_cast<uint64_t>(offsets.at(low - 1)) + static_cast<uint64_t>(row) -
                                static_cast<uint64_t>(indptr.at(low - 1)));
  }
};

// Cosine and sine of a 32-bit phase, within 1.2e-7. Minimax polynomials on an eighth of a revolution to each side of
// the nearest quarter.
FI_HOST_DEVICE void cos_sin_of_phase(uint32_t phase, float* cosine, float* sine) {
  const uint32_t quarter = (phase + 0x20000000u) >> 30;
  const float x = static_cast<float>(static_cast<int32_t>(phase - (quarter << 30))) * 0x1p-29f;
  const float t = x * x;
  float s = -0x1.2d9bb8p-15f, c = -0x1.4e5ed6p-12f;
  s = s * t + 0x1.465ec6p-9f;
  s = s * t - 0x1.4abbbap-4f;
  s = (s * t + 0x1.921fb6p-1f) * x;
  c = c * t + 0x1.03af5cp-6f;
  c = c * t - 0x1.3bd392p-2f;
  c = c * t + 1.0f;
  const float a = quarter & 1 ? s : c, b = quarter & 1 ? c : s;
  *cosine = (quarter + 1) & 2 ? -a : a;
  *sine = quarter & 2 ? -b : b;
}

}  // namespace fi
