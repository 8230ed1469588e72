// What the rope kernels are told, and the arithmetic of angles that host and device share.
#pragma once
#include "fi/divisor.h"

namespace fi {

// Integers in whichever of the two widths they came.
struct Index {
  const void* data;
  int32_t wide;  // int64, else int32

  FI_HOST_DEVICE int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

enum RopeKind { kRopeQ = 0, kRopeK = 1, kRopeV = 2 };

// [rows, heads, width]; strides in elements. With pages, out is [pages, slots, heads, width] and out_row a slot's
// stride.
struct RopePart {
  const void* in;
  void* out;  // may be in
  int64_t in_row, in_head, out_row, out_head, out_page;
};

// Heads of q, k and v in two parts: the rotated one and the rest, which is only converted (all of v).
struct RopeRows {
  RopePart rotated[2], rest[3];
  int32_t heads[3], rest_dim[3];
  int32_t rotary_dim;
  float scale[3];  // multiplies before the cast to fp8; not looked at otherwise
  int64_t rows;
  Index pos_ids;
  const float* cos_sin;  // [max_pos, rotary_dim]: cosines, then sines; null: computed
  int64_t cos_sin_row, max_pos;
  // CUDA: `lanes` threads share a head, `groups` of them the heads of a row.
  Divisor lanes, lanes_and_groups;
  int32_t groups;
};

// Angles are counted in turns, as 64-bit fractions of one: position * step modulo a turn is then one exact integer
// product, however large the position.
struct RopeFrequencies {
  static constexpr int kPowers = 10;  // pairs < 2^10
  double power[kPowers];              // theta^(-2 * 2^i / rotary_dim)
  double inverse_scale;
  double smooth_slope, smooth_offset;  // Llama 3.1: s = clamp(turns * slope + offset, 0, 1) of f, 1 - s of f / scale

  // Turns a position, before scaling.
  FI_HOST_DEVICE double turns(int32_t pair) const {
    double product = 0.15915494309189535;  // 1 / (2 pi)
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < kPowers; ++i)
      if (pair >> i & 1) product *= power[i];
    return product;
  }
  FI_HOST_DEVICE uint64_t step(double turns) const {
    double s = turns * smooth_slope + smooth_offset;
    s = s < 0.0 ? 0.0 : s > 1.0 ? 1.0 : s;
    double scaled = turns * (inverse_scale + s * (1.0 - inverse_scale));
    if (scaled >= 1.0) scaled -= static_cast<double>(static_cast<int64_t>(scaled));
    return static_cast<uint64_t>(scaled * 0x1p64);
  }
};

struct RopeParams {
  RopeRows rows;
  RopeFrequencies frequencies;
  Index indptr, offsets;  // used where pos_ids is null
  int64_t segments;

  // Where row r of segment b stands: offsets[b] + r - indptr[b]; 0, which rotates nothing, outside all segments.
  FI_HOST_DEVICE int64_t position(int64_t row) const {
    if (rows.pos_ids.data) return rows.pos_ids.at(row);
    int64_t low = 0, high = segments + 1;  // indptr[i] <= row for all i < low, > row for all i >= high
    while (low < high) {
      const int64_t middle = (low + high) >> 1;
      if (indptr.at(middle) <= row)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == 0 || low > segments) return 0;
    return offsets.at(low - 1) + row - indptr.at(low - 1);
  }
};

// Cosine and sine of a 32-bit fraction of a turn, within 1.2e-7: polynomials (minimax) on an eighth of a turn to each
// side of the nearest quarter.
FI_HOST_DEVICE void cos_sin_of_turn(uint32_t turn, float* cosine, float* sine) {
  const uint32_t quarter = (turn + 0x20000000u) >> 30;
  const float x = static_cast<float>(static_cast<int32_t>(turn - (quarter << 30))) * 0x1p-29f;
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
