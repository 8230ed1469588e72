// GEMM of bf16 tokens and weights of 4 or 8 bits on the CPU: blocks of rows of b become bf16, which holds them exactly,
// and meet all tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "fi/cpu/convert.h"
#include "fi/cpu/parallel.h"
#include "fi/gemm/gemm_cpu.h"
#include "fi/gemm/gemm_few_bits.h"

namespace fi::cpu {

// One row of b. group: 16 k with e4m3 scales, or 32 with exponents.
inline void dequantize_fp4_row(const GemmFewBitsParams& p, int32_t row, int32_t group, bf16_t* to) {
  const uint8_t* codes = p.b + row * p.b_row_stride;
  // The 128x4 layout: tiles of 128 rows by 4 groups, with rows r, r + 32, r + 64, r + 96 beside each other.
  const uint8_t* scales = p.scales + int64_t{row / 128} * p.scale_tiles * 512 + row % 32 * 16 + row % 128 / 32 * 4;
  for (int32_t at = 0; at < p.k; at += group) {
    const int32_t column = at / group;
    const uint8_t code = scales[column / 4 * 512 + column % 4];
    const float scale = group == 16 ? to_float(e4m3_t{code}) : ue8m0_to_float(code);
    uint16_t scaled[16];
    for (uint32_t i = 0; i < 16; ++i) scaled[i] = static_cast<uint16_t>(float_bits(e2m1_to_float(i) * scale) >> 16);
    for (int32_t i = 0; i < group; i += 2) {
      const uint8_t pair = codes[(at + i) / 2];
      to[at + i].bits = scaled[pair & 15];
      to[at + i + 1].bits = scaled[pair >> 4];
    }
  }
}

inline void dequantize_fp8_row(const GemmFewBitsParams& p, int32_t row, bf16_t* to) {
  const uint8_t* codes = p.b + row * p.b_row_stride;
  for (int32_t i = 0; i < p.k; ++i) to[i].bits = static_cast<uint16_t>(float_bits(to_float(e4m3_t{codes[i]})) >> 16);
}

// group: k that share a scale of fp4 weights; 0: weights are e4m3.
inline void gemm_few_bits(const GemmFewBitsParams& p, int32_t group, DType out, bool fixed_order) {
  constexpr int64_t kRows = 512;  // of b at a time
  const int64_t k = (p.k + 31) / 32 * 32;
  std::vector<bf16_t> weights(static_cast<size_t>(std::min<int64_t>(kRows, p.n) * k));
  for (int64_t first = 0; first < p.n; first += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, p.n - first);
    parallel_for(rows, std::max<int64_t>(1, 16384 / k), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto row = static_cast<int32_t>(first + i);
        bf16_t* to = weights.data() + i * k;
        group ? dequantize_fp4_row(p, row, group, to) : dequantize_fp8_row(p, row, to);
      }
    });
    GemmProblem q{};
    q.out = static_cast<char*>(p.out) + first * out.bytes();
    q.a = p.a;
    q.b = weights.data();
    q.a_scale = p.alpha;
    q.bias = p.bias ? static_cast<const char*>(p.bias) + first * out.bytes() : nullptr;
    q.out_row_stride = p.out_row_stride;
    q.a_row_stride = p.a_row_stride;
    q.b_row_stride = k;
    q.b_k_stride = 1;
    q.m = p.m;
    q.n = static_cast<int32_t>(rows);
    q.k = p.k;
    q.batch = q.matrices = q.a_scale_rows = q.b_scale_rows = 1;
    gemm(q, kBF16, kBF16, out, fixed_order);
  }
}

}  // namespace fi::cpu
