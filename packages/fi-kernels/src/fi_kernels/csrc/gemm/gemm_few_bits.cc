// gemm_few_bits: checks the arguments and launches the kernel of bf16 tokens and fp4 or fp8 weights, or runs the CPU
// one.
#include <algorithm>
#include <numeric>

#include "fi/gemm/gemm_few_bits.h"
#include "fi/gemm/gemm_fp8_weights_plan.h"
#include "fi/generated/gemm_few_bits.h"

#if !FI_CUDA
#include "fi/gemm/gemm_few_bits_cpu.h"
#endif

namespace fi {
namespace {

constexpr int64_t kLimit = 1 << 30;  // of rows and columns: row numbers are 32-bit

int64_t ceil_of(int64_t x, int64_t y) { return (x + y - 1) / y; }

#if FI_CUDA
// What a kernel of fp4 weights is compiled for. group: k that share a scale.
struct Form {
  int64_t tokens, group;
};

// A tile of weights: blocks of 16 rows, the warps that share them, and the stages of 128 bytes of k that fit.
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
Tile tile_of_blocks(const Form& form, int64_t blocks, int64_t m, int64_t n, int64_t shared) {
  constexpr int64_t kAlignment = 1024, kStages = 16, kWarps = 16, kStageK = 256;
  const int64_t rows = 16 * blocks;
  Tile t{blocks};
  t.ctas = ceil_of(m, form.tokens) * ceil_of(n, rows);
  t.scale_blocks = scale_blocks_of(rows);
  const int64_t stage = rows * 128 + form.tokens * kStageK * 2 + t.scale_blocks * kStageK / 4 / form.group * 512;
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
Tile tile(const Form& form, int64_t m, int64_t n, int64_t multiprocessors, int64_t shared) {
  Tile best;
  int64_t least = 0;
  for (int64_t blocks = 1; blocks <= 16; ++blocks) {
    const Tile t = tile_of_blocks(form, blocks, m, n, shared);
    if (!t.stages) continue;
    const int64_t cost = ceil_of(t.ctas, multiprocessors) * (2 * blocks + 1);
    if (!best.stages || cost < least) best = t, least = cost;
  }
  FI_CHECK(best.stages, RuntimeError, "no tile of weights fits %lld bytes of shared memory",
           static_cast<long long>(shared));
  return best;
}

// Launches the first entry, of fp4 weights, for operands that p has.
void launch_fp4(const Kernel& kernel, GemmFewBitsParams& p, const Form& form, DLDevice device, const Tensor& out,
                bool pdl) {
  constexpr int64_t kReserved = 2048;  // barriers
  const Tile t = tile(form, p.m, p.n, kernel.multiprocessors(device), kernel.shared_limit(device) - kReserved);
  p.blocks = static_cast<int32_t>(t.blocks);
  p.row_warps = static_cast<int32_t>(t.row_warps);
  p.stages = static_cast<int32_t>(t.stages);
  p.scale_blocks = static_cast<int32_t>(t.scale_blocks);
  const int64_t pair = 2 * out.dtype().bytes();
  p.pairs = out.alignment(pair, {p.out_row_stride}) == pair;
  const uint64_t sizes[] = {static_cast<uint64_t>(p.k / 2), static_cast<uint64_t>(p.n), 1};
  const uint64_t strides[] = {static_cast<uint64_t>(p.n > 1 ? p.b_row_stride : 128), 128};
  const uint32_t box[] = {128, static_cast<uint32_t>(16 * t.blocks), 1};
  kernel.describe(p.map, 1, 3, const_cast<uint8_t*>(p.b), sizes, strides, box);
  Launch launch{t.ctas};
  launch.shared_bytes = t.shared_bytes;
  launch.pdl = pdl;
  kernel.launch(kernel.entries.front(), launch, device, p);
}

// The same of fp8 weights.
void launch_fp8(const Kernel& kernel, const GemmFewBitsParams& p, int64_t tokens, DLDevice device, const Tensor& out,
                bool pdl) {
  const GemmCard card = card_with_clusters(kernel, device);
  const int64_t m = batch_invariant() ? 1 : p.m;  // else the number of tokens decides with which tile they meet
  const Fp8WeightsTile t = fp8_weights_tile({m, p.n, p.k, tokens}, kernel.shared_limit(device), card);
  GemmFp8WeightsParams q{};
  q.out = p.out;
  q.alpha = p.alpha;
  q.bias = p.bias;
  q.out_row_stride = p.out_row_stride;
  q.m = p.m;
  q.n = p.n;
  q.blocks = static_cast<int32_t>(t.blocks);
  q.row_warps = static_cast<int32_t>(t.row_warps);
  q.stages = static_cast<int32_t>(t.stages);
  q.k_stages = static_cast<int32_t>(ceil_of(p.k, kFp8WeightsStageK));
  q.splits = static_cast<int32_t>(t.splits);
  q.own_stages = static_cast<int32_t>(ceil_of(q.k_stages, t.splits));
  q.own_quads = static_cast<int32_t>(t.own_quads);
  q.token_tiles = static_cast<int32_t>(ceil_of(p.m, tokens));
  q.ring_bytes = static_cast<int32_t>(t.ring_bytes);
  q.b_once = q.token_tiles == 1 && int64_t{p.n} * p.k < kGemmSmallMEvictFirstBytes;
  const int64_t quad = 4 * out.dtype().bytes();
  q.quads = out.alignment(quad, {p.out_row_stride}) == quad;
  describe_operand(kernel, q.a, p.a, 2, p.k, p.m, 1, p.a_row_stride, 0, tokens);
  describe_operand(kernel, q.b, p.b, 1, p.k, p.n, 1, p.b_row_stride, 0, 16 * t.blocks);
  Launch launch{q.token_tiles * ceil_of(p.n, 16 * t.blocks) * t.splits};
  launch.shared_bytes = t.shared_bytes;
  launch.cluster = static_cast<unsigned>(t.splits);
  launch.pdl = pdl;
  kernel.launch(kernel.entries.front(), launch, device, q);
}
#endif

GemmFewBitsRequest request_of(const GemmFewBitsArgs& a) {
  const int64_t most_tokens = a.block_size || batch_invariant() ? 16 : 64;  // of a tile; m counts up to it
  const int64_t row_bytes = a.a.size_or_0(-1) / (a.block_size ? 2 : 1);
  const int64_t alignment = std::min({a.a.alignment(16, {a.a.stride_or_0(0)}), a.b.alignment(16, {a.b.stride_or_0(0)}),
                                      a.b.alignment(16, {row_bytes})});
  return {a.out.dtype(), a.block_size, alignment,
          batch_invariant() ? most_tokens : std::min(a.a.size_or_0(0), most_tokens)};
}

// Checks the scales of fp4 weights; the tiles of 4 scales of a row. group: k that share a scale.
int64_t scale_tiles_of(const GemmFewBitsArgs& a, int64_t n, int64_t k, int64_t group) {
  FI_CHECK(
      group == 16 || group == 32, ValueError,
      "block_size must be 16 (fp4 weights with e4m3 scales), 32 (with ue8m0 scales), or 0 (e4m3 weights); got %lld",
      static_cast<long long>(group));
  FI_CHECK(k % group == 0, ValueError, "a must have shape [m, k] with k a multiple of block_size %lld; got a %s, b %s",
           static_cast<long long>(group), a.a.shape_str().c_str(), a.b.shape_str().c_str());
  const int64_t tiles = ceil_of(k / group, 4), bytes = ceil_of(n, 128) * tiles * 512;
  a.b_scale.is({kU8, kE4M3}).on(a.a).contiguous();
  FI_CHECK(a.b_scale.numel() == bytes, ValueError,
           "b_scale must have %lld elements in the 128x4 layout (%lld rows and %lld columns of scales, padded to 128 "
           "and 4); got %s",
           static_cast<long long>(bytes), static_cast<long long>(n), static_cast<long long>(k / group),
           a.b_scale.shape_str().c_str());
  return tiles;
}

void gemm_few_bits(const Kernel& kernel, const GemmFewBitsArgs& a) {
  // 1 check
  Dim m{"m"}, n{"n"}, k{"k"}, half{"k / 2"};
  a.a.is({kBF16}).shape(m, k).inner_contiguous();
  const int64_t group = a.block_size;
  if (group) {
    half.value = k / 2;
    a.b.is({kU8}).on(a.a).shape(n, half).inner_contiguous();
  } else {
    a.b.is({kE4M3}).on(a.a).shape(n, k).inner_contiguous();
    FI_CHECK(!a.b_scale, ValueError, "b_scale must be None with e4m3 weights, which have alpha");
  }
  a.out.is({kF16, kBF16, kF32}).on(a.a).shape(m, n).inner_contiguous();
  FI_CHECK(k >= 1 && m <= kLimit && n <= kLimit && k <= kLimit, ValueError,
           "k must be positive, and m, n, k at most 2^30; got a %s, b %s", a.a.shape_str().c_str(),
           a.b.shape_str().c_str());
  const int64_t scale_tiles = group ? scale_tiles_of(a, n, k, group) : 0;
  if (a.alpha)
    FI_CHECK(a.alpha.is({kF32}).on(a.a).numel() == 1, ValueError, "alpha must have one element; got %s",
             a.alpha.shape_str().c_str());
  if (a.bias) a.bias.like(a.out).shape(n).contiguous();
  if (m == 0 || n == 0) return;

  // 2 shape
  GemmFewBitsParams p{};
  p.out = a.out.data();
  p.a = a.a.data();
  p.b = static_cast<const uint8_t*>(a.b.data());
  p.scales = group ? a.b_scale.data<const uint8_t>() : nullptr;
  p.alpha = a.alpha ? a.alpha.data<const float>() : nullptr;
  p.bias = a.bias ? a.bias.data() : nullptr;
  p.out_row_stride = a.out.stride(0);
  p.a_row_stride = a.a.stride(0);
  p.b_row_stride = a.b.stride(0);
  p.m = static_cast<int32_t>(m);
  p.n = static_cast<int32_t>(n);
  p.k = static_cast<int32_t>(k);
  p.scale_tiles = static_cast<int32_t>(scale_tiles);

  // 3 launch
#if FI_CUDA
  FI_CHECK(!group || a.b_scale.alignment(16, {}) == 16, ValueError,
           "b_scale must be 16-byte aligned; got address %p: call .clone() on it", a.b_scale.data());
  const int64_t tokens = GemmFewBitsConfig::of(kernel.entries.front()).tokens;
  if (group)
    launch_fp4(kernel, p, {tokens, group}, a.a.device(), a.out, kernel.pdl(a.enable_pdl));
  else
    launch_fp8(kernel, p, tokens, a.a.device(), a.out, kernel.pdl(a.enable_pdl));
#else
  (void)kernel, (void)a.enable_pdl;
  cpu::gemm_few_bits(p, static_cast<int32_t>(group), a.out.dtype(), batch_invariant());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::gemm_few_bits, fi::request_of)
