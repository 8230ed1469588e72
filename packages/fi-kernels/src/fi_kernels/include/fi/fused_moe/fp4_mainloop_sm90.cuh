// The mainloop of the expert GEMM on mxfp4 weights: warpgroups convert 64 rows of weights each to e4m3 in registers,
// which are the first operand of wgmma. Tokens are sums of e4m3 parts, so no bit of a 16-bit token is lost.
#pragma once
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/fused_moe/token_rows_sm90.cuh"

namespace fi {

// A stage has 256 k: 128 bytes of each of kWarpgroups * 64 rows of weights, and the parts of kTokens tokens
// (TokenForm::kInParts). T: of tokens in memory.
//
// An instruction takes 32 k, the k that share a scale, so scales multiply sums in fp32: converting a weight to e4m3
// costs less than one instruction, to bf16 times its scale two and a half. A lane has eight neighbouring weights of a
// row, the even ones in one register and the odd ones in another; tokens are stored in this order of k.
template <class T, int kTokens, int kWarpgroups, int kStages>
struct Fp4Mainloop {
  static constexpr int kRows = 64 * kWarpgroups, kLine = kSwizzleLineBytes, kCount = kTokens / 2;
  static constexpr int kReleases = 4 * kWarpgroups, kScales = kRows;
  static constexpr int kParts = kTokenParts<T>, kColumns = kParts * kTokens;
  static constexpr int kGroups = kColumns <= 16 ? 4 : kColumns <= 32 ? 2 : 1;  // of 32 k with accumulators of their own

  using Ring = Pipeline<kStages, Writer::kThreads, Reader::kBoth>;  // threads load weights and scales
  struct Operands {
    alignas(1024) char b[kStages][1][kRows * kLine];
    alignas(1024) char a[kStages][1][2 * kColumns * kLine];
  };
  struct Scales {
    alignas(16) uint4 b[kStages][1][kRows];  // bf16, of the 8 groups of a row
    alignas(16) float a[kStages][1][kTokens];
  };

  Operands& operands;
  Scales& scales;
  Ring& pipeline;
  int steps;   // stages of a tile
  int groups;  // of 32 k
  uint64_t a;
  int row, word;  // of this lane: its first row, and the offset of its word in a row's first group

  FI_DEVICE Fp4Mainloop(Operands& o, Scales& s, Ring& p, int stages)
      : operands(o),
        scales(s),
        pipeline(p),
        steps(stages),
        groups(8 * stages),
        a(wgmma_uniform(wgmma_operand(o.a[0][0], kSwizzlePeriod))),
        row(static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
        word(swizzled_offset(row, 0) + static_cast<int>(threadIdx.x) % 4 * 4) {}

  FI_DEVICE void run(float (&sum)[kCount], PipelineState& at) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] = 0.f;
    for (int i = 0; i < steps; ++i, at.advance(kStages)) {
      pipeline.wait(at);
      const int left = groups - 8 * i;
      float block[kCount];
      unsigned words[2 * kGroups];
      load(words, at.stage, 0);
#pragma unroll
      for (int group = 0; group < 8; group += kGroups) {
        if (group > 0 && group >= left) break;
        multiply(block, words, at.stage, group);
      }
      add_block(sum, block, at.stage);
      pipeline.release_warp(at.stage);
    }
  }

 private:
  // Eight weights of each of this lane's two rows, of each of kGroups groups.
  FI_DEVICE void load(unsigned (&words)[2 * kGroups], int stage, int group) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const char* from = operands.b[stage][0] + (word ^ (group + g) * 16);
      words[2 * g] = *reinterpret_cast<const unsigned*>(from);
      words[2 * g + 1] = *reinterpret_cast<const unsigned*>(from + 8 * kLine);
    }
  }
  // block (+)= the products of kGroups groups; then words are those of the next groups of the stage.
  FI_DEVICE void multiply(float (&block)[kCount], unsigned (&words)[2 * kGroups], int stage, int group) const {
    unsigned x[kGroups][4];
    float d[kGroups][kColumns / 2];
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int r = 0; r < 2; ++r) to_e4m3(words[2 * g + r], x[g][r], x[g][r + 2]);
    wgmma_fence();
    const uint64_t tokens = wgmma_further(a, stage * sizeof(operands.a[0]));
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      wgmma(d[g], x[g], wgmma_further(tokens, (group + g) / 4 * kColumns * kLine + (group + g) % 4 * 32), false,
            __nv_fp8_e4m3(), __nv_fp8_e4m3());
    wgmma_commit();
    if (group + kGroups < 8) load(words, stage, group + kGroups);
    const auto* factors = reinterpret_cast<const unsigned*>(&scales.b[stage][0][row]) + group / 2;
    unsigned low[(kGroups + 1) / 2], high[(kGroups + 1) / 2];
#pragma unroll
    for (int g = 0; g < (kGroups + 1) / 2; ++g) low[g] = factors[g], high[g] = factors[8 * 4 + g];
    wgmma_wait<0>();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[g][i]));
      wgmma_keep(d[g]);
      const bool upper = (group + g) % 2 != 0;
      add_group(block, d[g], half_of(low[g / 2], upper), half_of(high[g / 2], upper), group + g == 0);
    }
  }
  // A bf16 as a float.
  FI_DEVICE static float half_of(unsigned pair, bool upper) {
    return __uint_as_float(upper ? pair & 0xffff0000u : pair << 16);
  }
  // The parts of a token times the scales of this lane's two rows.
  FI_DEVICE static void add_group(float (&block)[kCount], const float (&d)[kColumns / 2], float low, float high,
                                  bool first) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float sum = d[j], weight = 1.f;
#pragma unroll
      for (int part = 1; part < kParts; ++part) {
        weight *= 1.f / kTokenPartStep;
        sum = fmaf(d[part * kCount + j], weight, sum);
      }
      const float scale = j % 4 < 2 ? low : high;
      block[j] = first ? sum * scale : fmaf(sum, scale, block[j]);
    }
  }
  FI_DEVICE void add_block(float (&sum)[kCount], const float (&block)[kCount], int stage) const {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const float2 token = *reinterpret_cast<const float2*>(&scales.a[stage][0][j * 2 + threadIdx.x % 4 * 2]);
      sum[j] = fmaf(block[j], token.x, sum[j]);
      sum[j + 1] = fmaf(block[j + 1], token.y, sum[j + 1]);
      sum[j + 2] = fmaf(block[j + 2], token.x, sum[j + 2]);
      sum[j + 3] = fmaf(block[j + 3], token.y, sum[j + 3]);
    }
  }
  // The bits of e2m1 are those of the exponent's lowest two and the mantissa's highest of an e4m3 of 2^-6 of the value.
  FI_DEVICE static void to_e4m3(unsigned word, unsigned& even, unsigned& odd) {
    even = (word << 4 & 0x80808080u) | (word << 2 & 0x1c1c1c1cu);
    odd = (word & 0x80808080u) | (word >> 2 & 0x1c1c1c1cu);
  }
};

}  // namespace fi
