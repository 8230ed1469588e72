// Products of bf16 panels by VDPBF16PS (Intel SDM, volume 2): pairs of bf16 are multiplied and added in fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "fi/cpu/convert.h"
#include "fi/cpu/prefetch.h"

#if !defined(FI_ONE_LEVEL) && defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12
#define FI_HAS_DOT_BF16 1
#include <immintrin.h>
#else
#define FI_HAS_DOT_BF16 0
#endif

namespace fi::cpu {

#if FI_HAS_DOT_BF16
#define FI_DOT_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

inline bool has_dot_bf16() {
  static const bool found = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl");
  return found;
}

// c[8][16 kPanels] += w[8][k] panels^T, whose sums stay in registers.
template <int kPanels>
FI_DOT_BF16 inline void dot_block(const char* w, int64_t w_stride, int64_t w_step, const char* panels,
                                  int64_t panel_bytes, int64_t k, float* c, int64_t c_stride, Prefetch& next,
                                  int64_t lines) {
  constexpr int kRows = 8;
  __m512 sum[kRows][kPanels];
#pragma GCC unroll 8  // a loop over the sums would keep them in memory
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kPanels; ++i) sum[r][i] = _mm512_loadu_ps(c + r * c_stride + i * 16);
  for (int64_t at = 0; at < k / 32; ++at, w += w_step) {
    next.lines(lines);
    for (int pair = 0; pair < 16; ++pair, panels += 64) {
      __m512bh x[kPanels];
      for (int i = 0; i < kPanels; ++i) x[i] = (__m512bh)_mm512_loadu_si512(panels + i * panel_bytes);
      for (int r = 0; r < kRows; ++r) {
        int32_t word;
        std::memcpy(&word, w + r * w_stride + pair * 4, 4);
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(word);
        for (int i = 0; i < kPanels; ++i) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], weight, x[i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kPanels; ++i) _mm512_storeu_ps(c + r * c_stride + i * 16, sum[r][i]);
}

// As amx_multiply.
FI_DOT_BF16 inline void dot_multiply(const bf16_t* w, int64_t w_stride, int64_t w_step, const bf16_t* panels,
                                     int64_t panel_stride, int64_t count, int64_t k, float* c, int64_t c_stride,
                                     Prefetch next) {
  const auto* rows = reinterpret_cast<const char*>(w);
  const int64_t panel_bytes = panel_stride * 2, lines = next.each((count + 2) / 3 * 4 * (k / 32));
  for (int64_t i = 0; i < count;) {
    // Three panels at a time, but four of them as two and two: one alone waits for the latency of its sums.
    const int64_t left = count - i, now = left >= 3 && left != 4 ? 3 : left >= 2 ? 2 : 1;
    const auto* x = reinterpret_cast<const char*>(panels + i * panel_stride);
    for (int64_t r = 0; r < 32; r += 8) {
      float* to = c + r * c_stride + i * 16;
      const char* from = rows + r * w_stride;
      if (now == 3)
        dot_block<3>(from, w_stride, w_step, x, panel_bytes, k, to, c_stride, next, lines);
      else if (now == 2)
        dot_block<2>(from, w_stride, w_step, x, panel_bytes, k, to, c_stride, next, lines);
      else
        dot_block<1>(from, w_stride, w_step, x, panel_bytes, k, to, c_stride, next, lines);
    }
    i += now;
  }
}

// out = in^T of 16 x 16 words, by shuffles, masked since GCC 12 says of the others that they read an undefined vector.
FI_DOT_BF16 inline void transpose_words(const void* in, int64_t in_stride, void* out, int64_t out_stride) {
  const auto* from = static_cast<const float*>(in);
  auto* to = static_cast<float*>(out);
  constexpr __mmask16 all = 0xffff;
  __m512 x[16], y[16];
  for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_ps(from + i * in_stride);
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_maskz_unpacklo_ps(all, x[i], x[i + 1]);
    y[i + 1] = _mm512_maskz_unpackhi_ps(all, x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // then x[i + c] holds column c of each quarter, rows i to i + 3
    x[i] = _mm512_maskz_shuffle_ps(all, y[i], y[i + 2], 0x44);
    x[i + 1] = _mm512_maskz_shuffle_ps(all, y[i], y[i + 2], 0xee);
    x[i + 2] = _mm512_maskz_shuffle_ps(all, y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm512_maskz_shuffle_ps(all, y[i + 1], y[i + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c, to += out_stride) {
    const __m512 a = _mm512_maskz_shuffle_f32x4(all, x[c], x[c + 4], 0x88),
                 b = _mm512_maskz_shuffle_f32x4(all, x[c + 8], x[c + 12], 0x88);
    const __m512 d = _mm512_maskz_shuffle_f32x4(all, x[c], x[c + 4], 0xdd),
                 e = _mm512_maskz_shuffle_f32x4(all, x[c + 8], x[c + 12], 0xdd);
    _mm512_storeu_ps(to, _mm512_maskz_shuffle_f32x4(all, a, b, 0x88));
    _mm512_storeu_ps(to + 4 * out_stride, _mm512_maskz_shuffle_f32x4(all, d, e, 0x88));
    _mm512_storeu_ps(to + 8 * out_stride, _mm512_maskz_shuffle_f32x4(all, a, b, 0xdd));
    _mm512_storeu_ps(to + 12 * out_stride, _mm512_maskz_shuffle_f32x4(all, d, e, 0xdd));
  }
}

// The sums of 16 vectors of 16 numbers, in order; masked as above.
FI_DOT_BF16 inline __m512 sums_of(const __m512 (&x)[16]) {
  constexpr __mmask16 all = 0xffff;
  __m512 y[8], z[4], w[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    y[i] = _mm512_add_ps(_mm512_maskz_unpacklo_ps(all, x[2 * i], x[2 * i + 1]),
                         _mm512_maskz_unpackhi_ps(all, x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    z[i] = _mm512_add_ps(_mm512_maskz_shuffle_ps(all, y[2 * i], y[2 * i + 1], 0x44),
                         _mm512_maskz_shuffle_ps(all, y[2 * i], y[2 * i + 1], 0xee));
  for (int i = 0; i < 2; ++i)
    w[i] = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(all, z[2 * i], z[2 * i + 1], 0x88),
                         _mm512_maskz_shuffle_f32x4(all, z[2 * i], z[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_maskz_shuffle_f32x4(all, w[0], w[1], 0x88),
                       _mm512_maskz_shuffle_f32x4(all, w[0], w[1], 0xdd));
}

// c[kColumns][kRows] = x[kColumns][k] w[kRows][k]^T, whose sums stay in registers. The last 32 of a row of x may be
// padded, a row of w ends at k.
template <int kRows, int kColumns>
FI_DOT_BF16 inline void dot_few_block(const bf16_t* w, int64_t w_stride, const bf16_t* x, int64_t x_stride, int64_t k,
                                      float* c, int64_t c_stride) {
  __m512 sum[kRows][kColumns];
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kColumns; ++i) sum[r][i] = _mm512_setzero_ps();
  for (int64_t at = 0; at < k; at += 32) {
    const __mmask32 inside = k - at >= 32 ? ~__mmask32{0} : (__mmask32{1} << (k - at)) - 1;
    __m512bh right[kColumns];
    for (int i = 0; i < kColumns; ++i) right[i] = (__m512bh)_mm512_loadu_si512(x + i * x_stride + at);
    for (int r = 0; r < kRows; ++r) {
      const bf16_t* from = w + r * w_stride + at;
      const __m512bh left = (__m512bh)_mm512_maskz_loadu_epi16(inside, from);
      _mm_prefetch(reinterpret_cast<const char*>(from + kRows * w_stride), _MM_HINT_T0);  // the next rows of w
      for (int i = 0; i < kColumns; ++i) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], left, right[i]);
    }
  }
  __m512 all[16];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
      all[i * 4 + r] = i < kColumns && r < kRows ? sum[r % kRows][i % kColumns] : _mm512_setzero_ps();
  alignas(64) float sums[16];
  _mm512_store_ps(sums, sums_of(all));
  for (int i = 0; i < kColumns; ++i) std::memcpy(c + i * c_stride, sums + i * 4, kRows * sizeof(float));
}

template <int kRows>
FI_DOT_BF16 inline void dot_few_rows(const bf16_t* w, int64_t w_stride, const bf16_t* x, int64_t x_stride,
                                     int64_t count, int64_t k, float* c, int64_t c_stride) {
  for (int64_t i = 0; i < count; i += 4, x += 4 * x_stride, c += 4 * c_stride) {
    if (count - i >= 4)
      dot_few_block<kRows, 4>(w, w_stride, x, x_stride, k, c, c_stride);
    else if (count - i == 3)
      dot_few_block<kRows, 3>(w, w_stride, x, x_stride, k, c, c_stride);
    else if (count - i == 2)
      dot_few_block<kRows, 2>(w, w_stride, x, x_stride, k, c, c_stride);
    else
      dot_few_block<kRows, 1>(w, w_stride, x, x_stride, k, c, c_stride);
  }
}

// c[count][rows] = x[count][k] w[rows][k]^T for few rows of x: a load of w serves 32 products, where panels need a
// broadcast for 2. Rows of x are padded with zeros to a multiple of 32.
FI_DOT_BF16 inline void dot_few(const bf16_t* w, int64_t w_stride, int64_t rows, const bf16_t* x, int64_t x_stride,
                                int64_t count, int64_t k, float* c, int64_t c_stride) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) dot_few_rows<4>(w + r * w_stride, w_stride, x, x_stride, count, k, c + r, c_stride);
  for (; r < rows; ++r) dot_few_rows<1>(w + r * w_stride, w_stride, x, x_stride, count, k, c + r, c_stride);
}
#else
inline bool has_dot_bf16() { return false; }
inline void transpose_words(const void*, int64_t, void*, int64_t) {}
inline void dot_few(const bf16_t*, int64_t, int64_t, const bf16_t*, int64_t, int64_t, int64_t, float*, int64_t) {}
inline void dot_multiply(const bf16_t*, int64_t, int64_t, const bf16_t*, int64_t, int64_t, int64_t, float*, int64_t,
                         Prefetch) {}
#endif

}  // namespace fi::cpu
