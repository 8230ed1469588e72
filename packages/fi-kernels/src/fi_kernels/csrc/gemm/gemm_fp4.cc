// gemm_fp4: checks the arguments and launches the kernel of bf16 tokens and fp4 weights, or runs the CPU one.
#include "fi/gemm/gemm_fp4.h"

#include <algorithm>
#include <numeric>

#include "fi/generated/gemm_fp4.h"

#if !FI_CUDA
#include "fi/gemm/gemm_fp4_cpu.h"
#endif

namespace fi {
namespace {

constexpr int64_t kLimit = 1 << 30;  // of rows and columns: row numbers are 32-bit

int64_t ceil_of(int64_t x, int64_t y) { return (x + y - 1) / y; }

#if FI_CUDA
// A tile of weights: blocks of 16 rows, the warps that share them, and the stages of 256 k that fit.
struct Tile {
  int64_t blocks = 0, row_warps = 0, stages = 0, scale_blocks = 0, shared_bytes = 0, ctas = 0;
};

// Blocks of 128 rows that `rows` from a multiple of `rows` on touch, at most; rows: a multiple of 16.
int64_t scale_blocks_of(int64_t rows) {
  if (128 % rows == 0 || rows % 128 == 0) return ceil_of(rows, 128);
  return (rows + 112 + 127) / 128;
}

// With the fewest warps that share rows such that twice the stages fit that are read at a time. A set of warps always
// reads the same stages, and a loading warp fills the same ones, so that their waits see every phase of the barriers.
Tile tile_of_blocks(int64_t blocks, int64_t m, int64_t n, int64_t group, int64_t tokens, int64_t shared) {
  constexpr int64_t kStageK = 256, kAlignment = 1024, kStages = 16, kWarps = 16;
  const int64_t rows = 16 * blocks;
  Tile t{blocks};
  t.ctas = ceil_of(m, tokens) * ceil_of(n, rows);
  t.scale_blocks = scale_blocks_of(rows);
  const int64_t stage = rows * kStageK / 2 + tokens * kStageK * 2 + t.scale_blocks * kStageK / 4 / group * 512;
  const int64_t most = std::min(kStages, (shared - kAlignment) / stage);
  for (t.row_warps = 1; t.row_warps <= 4; t.row_warps *= 2) {
    if (blocks > t.row_warps * kFp4WarpBlocks) continue;
    const int64_t at_a_time = kWarps / 2 / t.row_warps, step = std::lcm<int64_t>(at_a_time, kFp4Loaders);
    t.stages = most / step * step;
    t.shared_bytes = kAlignment + std::max(t.stages * stage, kWarps / t.row_warps * tokens * (rows + 4) * int64_t{4});
    if (t.stages >= 2 * at_a_time && t.shared_bytes <= shared) return t;
  }
  t.stages = 0;
  return t;
}

// The tile with which the busiest SM has the fewest rows. It costs as much as half a block more: tokens and sums.
Tile tile(int64_t m, int64_t n, int64_t group, int64_t tokens, int64_t multiprocessors, int64_t shared) {
  Tile best;
  int64_t least = 0;
  for (int64_t blocks = 1; blocks <= 16; ++blocks) {
    const Tile t = tile_of_blocks(blocks, m, n, group, tokens, shared);
    if (!t.stages) continue;
    const int64_t cost = ceil_of(t.ctas, multiprocessors) * (2 * blocks + 1);
    if (!best.stages || cost < least) best = t, least = cost;
  }
  FI_CHECK(best.stages, RuntimeError, "no tile of gemm_fp4 fits %lld bytes of shared memory",
           static_cast<long long>(shared));
  return best;
}
#endif

GemmFp4Request request_of(const GemmFp4Args& a) {
  constexpr int64_t kMostTokens = 16;  // of a tile; m counts up to it
  const int64_t alignment = std::min({a.a.alignment(16, {a.a.stride_or_0(0)}), a.b.alignment(16, {a.b.stride_or_0(0)}),
                                      a.b.alignment(16, {a.a.size_or_0(-1) / 2})});
  return {a.out.dtype(), a.block_size, alignment, std::min(a.a.size_or_0(0), kMostTokens)};
}

void gemm_fp4(const Kernel& kernel, const GemmFp4Args& a) {
  // 1 check
  Dim m{"m"}, n{"n"}, k{"k"}, half{"k / 2"};
  a.a.is({kBF16}).shape(m, k).inner_contiguous();
  half.value = k / 2;
  a.b.is({kU8}).on(a.a).shape(n, half).inner_contiguous();
  a.out.is({kF16, kBF16, kF32}).on(a.a).shape(m, n).inner_contiguous();
  const int64_t group = a.block_size;
  FI_CHECK(group == 16 || group == 32, ValueError, "block_size must be 16 (e4m3 scales) or 32 (ue8m0 scales); got %lld",
           static_cast<long long>(group));
  FI_CHECK(
      k >= 1 && k % group == 0 && m <= kLimit && n <= kLimit && k <= kLimit, ValueError,
      "a must have shape [m, k] with a positive k that is a multiple of block_size %lld, and m, n, k at most 2^30; "
      "got a %s, b %s",
      static_cast<long long>(group), a.a.shape_str().c_str(), a.b.shape_str().c_str());
  const int64_t scale_tiles = ceil_of(k / group, 4), scale_bytes = ceil_of(n, 128) * scale_tiles * 512;
  a.b_scale.is({kU8, kE4M3}).on(a.a).contiguous();
  FI_CHECK(a.b_scale.numel() == scale_bytes, ValueError,
           "b_scale must have %lld elements in the 128x4 layout (%lld rows and %lld columns of scales, padded to 128 "
           "and 4); got %s",
           static_cast<long long>(scale_bytes), static_cast<long long>(n), static_cast<long long>(k / group),
           a.b_scale.shape_str().c_str());
  if (a.alpha)
    FI_CHECK(a.alpha.is({kF32}).on(a.a).numel() == 1, ValueError, "alpha must have one element; got %s",
             a.alpha.shape_str().c_str());
  if (m == 0 || n == 0) return;

  // 2 shape
  GemmFp4Params p{};
  p.out = a.out.data();
  p.a = a.a.data();
  p.b = a.b.data<const uint8_t>();
  p.scales = a.b_scale.data<const uint8_t>();
  p.alpha = a.alpha ? a.alpha.data<const float>() : nullptr;
  p.out_row_stride = a.out.stride(0);
  p.a_row_stride = a.a.stride(0);
  p.b_row_stride = a.b.stride(0);
  p.m = static_cast<int32_t>(m);
  p.n = static_cast<int32_t>(n);
  p.k = static_cast<int32_t>(k);
  p.scale_tiles = static_cast<int32_t>(scale_tiles);

  // 3 launch
#if FI_CUDA
  FI_CHECK(a.b_scale.alignment(16, {}) == 16, ValueError,
           "b_scale must be 16-byte aligned; got address %p: call .clone() on it", a.b_scale.data());
  const Entry& entry = kernel.entries.front();
  const int64_t tokens = GemmFp4Config::of(entry).tokens;
  const int64_t reserved = 2048;  // barriers
  const Tile t =
      tile(m, n, group, tokens, kernel.multiprocessors(a.a.device()), kernel.shared_limit(a.a.device()) - reserved);
  p.blocks = static_cast<int32_t>(t.blocks);
  p.row_warps = static_cast<int32_t>(t.row_warps);
  p.stages = static_cast<int32_t>(t.stages);
  p.scale_blocks = static_cast<int32_t>(t.scale_blocks);
  const int64_t pair = 2 * a.out.dtype().bytes();
  p.pairs = a.out.alignment(pair, {p.out_row_stride}) == pair;
  const uint64_t sizes[] = {static_cast<uint64_t>(half), static_cast<uint64_t>(n), 1};
  const uint64_t strides[] = {static_cast<uint64_t>(n > 1 ? p.b_row_stride : 128), 128};
  const uint32_t box[] = {128, static_cast<uint32_t>(16 * t.blocks), 1};
  kernel.describe(p.map, 1, 3, a.b.data(), sizes, strides, box);
  Launch launch{t.ctas};
  launch.shared_bytes = t.shared_bytes;
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.a.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  cpu::gemm_fp4(p, static_cast<int32_t>(group), a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::gemm_fp4, fi::request_of)
