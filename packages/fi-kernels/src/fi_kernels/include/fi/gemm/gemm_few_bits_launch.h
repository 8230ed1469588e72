// The launch of the GEMM of few tokens and weights of 4 or 8 bits: its tile of weights.
#pragma once
#include <algorithm>
#include <numeric>

#include "fi/gemm/gemm_few_bits.h"
#include "fi/host/kernel.h"

namespace fi {

constexpr int64_t kFewBitsLimit = 1 << 30;  // of rows and columns: row numbers are 32-bit

inline int64_t few_bits_ceil(int64_t x, int64_t y) { return (x + y - 1) / y; }

#if FI_CUDA
// What a kernel is compiled for. group: k that share a scale; 0: none do.
struct FewBitsForm {
  int64_t bits, tokens, group;
};

// A tile of weights: blocks of 16 rows, the warps that share them, and the stages of 128 bytes of k that fit.
struct FewBitsTile {
  int64_t blocks = 0, row_warps = 0, stages = 0, scale_blocks = 0, shared_bytes = 0, ctas = 0;
};

// Blocks of 128 rows that `rows` from a multiple of `rows` on touch, at most; rows: a multiple of 16.
inline int64_t few_bits_scale_blocks(int64_t rows) {
  if (128 % rows == 0 || rows % 128 == 0) return few_bits_ceil(rows, 128);
  return (rows + 112 + 127) / 128;
}

// With the fewest warps that share rows such that twice the stages fit that are read at a time. A set of warps always
// reads the same stages, and a loading warp fills the same ones, so that their waits see every phase of the barriers.
inline FewBitsTile few_bits_tile_of(const FewBitsForm& form, int64_t blocks, int64_t m, int64_t n, int64_t shared) {
  constexpr int64_t kAlignment = 1024, kStages = 16, kWarps = 16;
  const int64_t rows = 16 * blocks, stage_k = 1024 / form.bits;
  FewBitsTile t{blocks};
  t.ctas = few_bits_ceil(m, form.tokens) * few_bits_ceil(n, rows);
  t.scale_blocks = form.group ? few_bits_scale_blocks(rows) : 0;
  const int64_t scales = form.group ? t.scale_blocks * stage_k / 4 / form.group * 512 : 0;
  const int64_t stage = rows * 128 + form.tokens * stage_k * 2 + scales;
  const int64_t most = std::min(kStages, (shared - kAlignment) / stage);
  for (t.row_warps = 1; t.row_warps <= 4; t.row_warps *= 2) {
    if (blocks > t.row_warps * kFewBitsWarpBlocks) continue;
    const int64_t at_a_time = kWarps / 2 / t.row_warps, step = std::lcm<int64_t>(at_a_time, kFewBitsLoaders);
    t.stages = most / step * step;
    t.shared_bytes =
        kAlignment + std::max(t.stages * stage, kWarps / t.row_warps * form.tokens * (rows + 4) * int64_t{4});
    if (t.stages >= 2 * at_a_time && t.shared_bytes <= shared) return t;
  }
  t.stages = 0;
  return t;
}

// The tile with which the busiest SM has the fewest rows. It costs as much as half a block more: tokens and sums.
inline FewBitsTile few_bits_tile(const FewBitsForm& form, int64_t m, int64_t n, int64_t multiprocessors,
                                 int64_t shared) {
  FewBitsTile best;
  int64_t least = 0;
  for (int64_t blocks = 1; blocks <= 16; ++blocks) {
    const FewBitsTile t = few_bits_tile_of(form, blocks, m, n, shared);
    if (!t.stages) continue;
    const int64_t cost = few_bits_ceil(t.ctas, multiprocessors) * (2 * blocks + 1);
    if (!best.stages || cost < least) best = t, least = cost;
  }
  FI_CHECK(best.stages, RuntimeError, "no tile of weights of %lld bits fits %lld bytes of shared memory",
           static_cast<long long>(form.bits), static_cast<long long>(shared));
  return best;
}

// Launches the first entry for operands that p has.
inline void launch_few_bits(const Kernel& kernel, GemmFewBitsParams& p, const FewBitsForm& form, DLDevice device,
                            const Tensor& out, bool pdl) {
  constexpr int64_t kReserved = 2048;  // barriers
  const FewBitsTile t =
      few_bits_tile(form, p.m, p.n, kernel.multiprocessors(device), kernel.shared_limit(device) - kReserved);
  p.blocks = static_cast<int32_t>(t.blocks);
  p.row_warps = static_cast<int32_t>(t.row_warps);
  p.stages = static_cast<int32_t>(t.stages);
  p.scale_blocks = static_cast<int32_t>(t.scale_blocks);
  const int64_t pair = 2 * out.dtype().bytes();
  p.pairs = out.alignment(pair, {p.out_row_stride}) == pair;
  const uint64_t sizes[] = {static_cast<uint64_t>(p.k * form.bits / 8), static_cast<uint64_t>(p.n), 1};
  const uint64_t strides[] = {static_cast<uint64_t>(p.n > 1 ? p.b_row_stride : 128), 128};
  const uint32_t box[] = {128, static_cast<uint32_t>(16 * t.blocks), 1};
  kernel.describe(p.map, 1, 3, const_cast<uint8_t*>(p.b), sizes, strides, box);
  Launch launch{t.ctas};
  launch.shared_bytes = t.shared_bytes;
  launch.pdl = pdl;
  kernel.launch(kernel.entries.front(), launch, device, p);
}
#endif

}  // namespace fi
