// gemm: checks the arguments, launches the implementation that its entries are of with the tile shape that a cost model
// prefers, or runs the CPU kernel.
#include "fi/gemm/gemm.h"

#include <algorithm>

#include "fi/gemm/gemm_mma.h"
#include "fi/gemm/gemm_plan.h"
#include "fi/gemm/gemm_sm90.h"
#include "fi/generated/gemm.h"
#include "fi/host/contents.h"

#if !FI_CUDA
#include "fi/gemm/gemm_cpu.h"
#endif

namespace fi {
namespace {

constexpr int64_t kLimit = 1 << 30;  // of rows and columns: row numbers of tiles are 32-bit

// Whether the epilogue decides, where whole lines are stored faster by the kernel for any number of tokens. H200, us of
// wgmma_small_m_sm90 and wgmma_sm90: 128 products of 64 x 512 x 128 bf16 18.6 and 13.7, fp8 14.8 and 11.3; of 16 x 512
// x 128 bf16 14.4 and 13.1, fp8 10.4 and 11.0. Not in a single product with k 1024 in fp8: 25 x 3584 8.2 and 9.7, 125 x
// 4096 9.1 and 10.2.
bool short_k(int64_t k, int64_t bytes, bool alone) { return k <= 512 || (!alone && k * bytes <= 1024); }

// The contract of a scale tensor: none, one, [.., rows], or [.., rows or ceil(rows / 128), ceil(k / 128)].
struct Scale {
  const float* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0, k_stride = 0, rows = 1;
  bool blocks = false;
};

Scale scale_of(const OptionalTensor& scale, const Tensor& operand, int64_t batch, int64_t rows, int64_t k) {
  Scale s;
  if (!scale) return s;
  scale.is({kF32}).on(operand);
  s.data = scale.data<float>();
  const int64_t ndim = operand.ndim(), blocks = gemm_ceil(k, 128);
  const bool one_block = blocks == 1 && gemm_ceil(rows, 128) == 1 && (ndim == 2 || batch == 1);
  if (scale.numel() == 1 && !(scale.ndim() == ndim && one_block)) return s;
  s.blocks = scale.ndim() == ndim;
  const int64_t own = s.blocks ? scale.size(-2) : scale.size(-1);
  const bool coarse = s.blocks && own == gemm_ceil(rows, 128) && own != rows;
  const bool fits = (s.blocks || scale.ndim() == ndim - 1) && (own == rows || coarse) &&
                    (!s.blocks || scale.size(-1) == blocks) && (ndim == 2 || scale.size(0) == batch);
  FI_CHECK(fits, ValueError,
           "%s must have one element, or a scale for each row of %s [%s%lld], or for each block of 128 k of 1 or 128 "
           "rows [%s%lld or %lld, %lld]; got %s",
           scale.name(), operand.name(), ndim == 3 ? "batch, " : "", static_cast<long long>(rows),
           ndim == 3 ? "batch, " : "", static_cast<long long>(rows), static_cast<long long>(gemm_ceil(rows, 128)),
           static_cast<long long>(blocks), scale.shape_str().c_str());
  s.rows = coarse ? 128 : 1;
  s.batch_stride = ndim == 3 ? scale.stride(0) : 0;
  s.row_stride = scale.stride(s.blocks ? -2 : -1);
  s.k_stride = s.blocks ? scale.stride(-1) : 0;
  return s;
}

int64_t batch_stride(const Tensor& x) { return x.ndim() == 3 ? x.stride(0) : 0; }

// The checked problem. a and out have the batch dimension exactly where they are of three dimensions.
GemmProblem problem_of(const GemmArgs& a) {
  const bool indptr{a.m_indptr}, indices{a.m_indices}, masked{a.masked_m};
  FI_CHECK(indptr + indices + masked <= 1, ValueError, "at most one of m_indptr, m_indices and masked_m may be given");
  const bool grouped = indptr || indices;
  Dim matrices{"batch", a.b.ndim() == 2 ? 1 : -1}, m{"m"}, n{"n"}, k{"k"};
  a.a.is({kF16, kBF16, kE4M3, kE5M2});
  a.b.is({kF16, kBF16, kE4M3, kE5M2}).on(a.a);
  const bool fp8 = a.a.dtype().bits == 8;
  FI_CHECK(fp8 ? a.b.dtype().bits == 8 && !(a.a.dtype() == kE5M2 && a.b.dtype() == kE5M2) : a.b.dtype() == a.a.dtype(),
           TypeError,
           "b must have the dtype of a, or both must be float8 and one of them float8_e4m3fn; got a %s, b %s",
           a.a.dtype().str().c_str(), a.b.dtype().str().c_str());
  if (a.b.ndim() == 2) {
    FI_CHECK(!grouped && !masked, ValueError, "b must have shape [groups, n, k] for grouped rows; got %s",
             a.b.shape_str().c_str());
    a.b.shape(n, k);
  } else {
    a.b.shape(matrices, n, k);
  }
  Dim batch{"batch", a.b_indices ? -1 : int64_t{matrices}};
  if (a.b_indices) {
    FI_CHECK(indptr || masked, ValueError, "b_indices must come with m_indptr or masked_m");
    a.b_indices.is({kI32}).on(a.a).shape(batch).contiguous();
  }
  if (a.b.ndim() == 2 || grouped) {
    a.a.shape(m, k);
    a.out.shape(m, n);
  } else {
    a.a.shape(batch, m, k);
    a.out.shape(batch, m, n);
  }
  a.a.inner_contiguous();
  if (a.b.stride(-1) == 1 || a.b.stride(-2) != 1) a.b.inner_contiguous();
  a.out.is({kF16, kBF16, kF32}).on(a.a).inner_contiguous();
  FI_CHECK(k >= 1 && k <= kLimit && m <= kLimit && n <= kLimit && batch <= kLimit && matrices <= kLimit, ValueError,
           "k must be positive, and m, n, k and batch at most 2^30; got a %s, b %s", a.a.shape_str().c_str(),
           a.b.shape_str().c_str());
  if (a.bias) a.bias.like(a.out).shape(n).contiguous();

  GemmProblem p{};
  p.out = a.out.data();
  p.a = a.a.data();
  p.b = a.b.data();
  p.bias = a.bias ? a.bias.data() : nullptr;
  p.m = static_cast<int32_t>(m);
  p.n = static_cast<int32_t>(n);
  p.k = static_cast<int32_t>(k);
  p.batch = static_cast<int32_t>(batch);
  p.matrices = static_cast<int32_t>(matrices);
  p.b_indices = a.b_indices ? a.b_indices.data<int32_t>() : nullptr;
  p.out_batch_stride = batch_stride(a.out);
  p.out_row_stride = a.out.stride(-2);
  p.a_batch_stride = batch_stride(a.a);
  p.a_row_stride = a.a.stride(-2);
  p.b_batch_stride = batch_stride(a.b);
  p.b_row_stride = a.b.stride(-2);
  p.b_k_stride = p.k > 1 ? a.b.stride(-1) : 1;
  p.rows = indptr ? GemmRows::kIndptr : indices ? GemmRows::kIndices : masked ? GemmRows::kMasked : GemmRows::kBatched;
  const OptionalTensor& groups = indptr ? a.m_indptr : indices ? a.m_indices : a.masked_m;
  if (groups) {
    Dim count{indptr ? "batch + 1" : indices ? "m" : "batch", indptr ? batch + 1 : indices ? m : batch};
    p.row_groups = groups.is({kI32}).on(a.a).shape(count).contiguous().data<int32_t>();
  }
  const Scale sa = scale_of(a.a_scale, a.a, batch, m, k), sb = scale_of(a.b_scale, a.b, matrices, n, k);
  FI_CHECK(sa.blocks == sb.blocks && (!sa.blocks || fp8), ValueError,
           "a_scale and b_scale must both be of blocks of 128 k, with float8 operands, or neither; got a_scale %s, "
           "b_scale %s",
           a.a_scale ? a.a_scale.shape_str().c_str() : "None", a.b_scale ? a.b_scale.shape_str().c_str() : "None");
  FI_CHECK(!a.use_fast_accum || (fp8 && !sa.blocks), ValueError,
           "use_fast_accum must be False with 16-bit operands and with scales of blocks, whose sums are in fp32");
  FI_CHECK(!sa.blocks || !a.bias, ValueError, "bias must be None with scales of blocks; got %s",
           a.bias.shape_str().c_str());
  p.a_scale = sa.data;
  p.a_scale_batch_stride = sa.batch_stride;
  p.a_scale_row_stride = sa.row_stride;
  p.a_scale_k_stride = sa.k_stride;
  p.a_scale_rows = static_cast<int32_t>(sa.rows);
  p.b_scale = sb.data;
  p.b_scale_batch_stride = sb.batch_stride;
  p.b_scale_row_stride = sb.row_stride;
  p.b_scale_k_stride = sb.k_stride;
  p.b_scale_rows = static_cast<int32_t>(sb.rows);
  return p;
}

// Raises unless the tables of groups name rows of a and matrices of b, one matrix for each 128 rows of m_indices.
void check_tables(const Kernel& kernel, const GemmArgs& a, const GemmProblem& p) {
  const auto within = [&](const OptionalTensor& table, int64_t least, int64_t most) {
    if (!table) return;
    const Integers values(kernel, table);
    for (int64_t i = 0; i < values.size(); ++i)
      FI_CHECK(values[i] >= least && values[i] <= most, ValueError, "%s must be in %lld..%lld; got %lld at %lld",
               table.name(), static_cast<long long>(least), static_cast<long long>(most),
               static_cast<long long>(values[i]), static_cast<long long>(i));
  };
  if (a.m_indptr) check_offsets(Integers(kernel, a.m_indptr), p.m);
  within(a.m_indices, -1, p.matrices - 1);
  if (a.m_indices) {
    const Integers values(kernel, a.m_indices);
    for (int64_t i = 0; i < values.size(); ++i)
      FI_CHECK(values[i] == -1 || values[i] == values[i / 128 * 128], ValueError,
               "%s must be the same, or -1, for each 128 rows, counted from 0; got %lld at %lld after %lld",
               values.name(), static_cast<long long>(values[i]), static_cast<long long>(i),
               static_cast<long long>(values[i / 128 * 128]));
  }
  within(a.masked_m, 0, p.m);
  within(a.b_indices, 0, p.matrices - 1);
}

#if FI_CUDA
using Tile = GemmChoice<GemmConfig>;

// The number of tiles: all of them, or an upper bound for groups of unknown sizes, each of which may end in a part of a
// tile.
int64_t tiles_of(const GemmProblem& p, const GemmConfig& t) {
  const int64_t columns = gemm_ceil(p.n, t.columns);
  if (p.rows == GemmRows::kIndptr) return (p.m / t.rows + p.batch) * columns;
  return (p.rows == GemmRows::kIndices ? 1 : p.batch) * gemm_ceil(p.m, t.rows) * columns;
}

// Parts of k that a call adds one by one inside of batch_invariant(), whatever the number of tokens; 1: one order of k.
int64_t parts_of(const GemmProblem& p, const GemmArgs& a) {
  const bool one = p.rows == GemmRows::kBatched && p.batch == 1 && p.b_k_stride == 1 && a.a.dtype().bytes() == 2;
  return batch_invariant() && one ? gemm_fixed_parts(p.n, gemm_ceil(p.k * 2, 128)) : 1;
}

bool one_a(const GemmProblem& p) { return p.rows == GemmRows::kIndptr || p.rows == GemmRows::kIndices; }

bool stores_vectors(const Tensor& out, const GemmProblem& p, int64_t bytes) {
  return out.alignment(bytes, {p.out_row_stride, p.out_batch_stride}) == bytes;
}

// Of mma.sync: the tile shape whose waves compute the fewest elements, of those that take the alignment.
Tile mma_tile(const Kernel& kernel, const GemmProblem& p, const GemmArgs& a, int64_t rows, int64_t multiprocessors) {
  const bool vectors = p.b_k_stride == 1 && a.a.alignment(16, {p.a_row_stride, p.a_batch_stride}) == 16 &&
                       a.b.alignment(16, {p.b_row_stride, p.b_batch_stride}) == 16;
  Tile best;
  int64_t least = 0;
  for (const Entry& entry : kernel.entries) {
    const auto config = GemmConfig::of(entry);
    if ((config.load_bytes == 16) != vectors) continue;
    const int64_t tiles = p.batch * gemm_ceil(rows, config.rows) * gemm_ceil(p.n, config.columns);
    // Small tiles load more for each product: an SM computes 32 rows at about half of the speed of 128.
    const int64_t cost = gemm_ceil(tiles, multiprocessors) * (config.rows + 32) * (config.columns + 32);
    if (!best.entry || cost < least) best = {&entry, config}, least = cost;
  }
  return best;
}

// Of the kernel for few tokens. `tactic` counts entries and, for each, clusters of 1 to 8 CTAs that split k.
Tile small_m_tile(const Kernel& kernel, const GemmProblem& p, const GemmArgs& a, const GemmSmallMShape& shape,
                  const GemmCard& card) {
  const auto fits = [&](const GemmConfig& config, int64_t splits) {
    return gemm_small_m_fits(shape, {config.rows, config.columns, config.stage_blocks, splits});
  };
  const auto tactics = kGemmSmallMSplits * static_cast<int64_t>(kernel.entries.size());
  FI_CHECK(a.tactic < tactics, ValueError, "tactic must be -1, or below %lld; got %lld",
           static_cast<long long>(tactics), static_cast<long long>(a.tactic));
  if (a.tactic >= 0) {
    const Entry& entry = kernel.entries[a.tactic / kGemmSmallMSplits];
    const auto config = GemmConfig::of(entry);
    const int64_t splits = a.tactic % kGemmSmallMSplits + 1;
    return {&entry, config, p.rows == GemmRows::kBatched && fits(config, splits) ? splits : 1};
  }
  const int64_t most = GemmConfig::of(kernel.entries.front()).rows;
  const int64_t wanted = p.rows == GemmRows::kBatched ? gemm_small_m_splits(shape, gemm_ceil(shape.rows, most)) : 1;
  const int64_t splits = batch_invariant() ? parts_of(p, a) : wanted;
  Tile best;
  GemmPredictions<GemmConfig> predictions;
  double least = 0;
  for (const Entry& entry : kernel.entries) {
    const auto config = GemmConfig::of(entry);
    if (!fits(config, splits)) continue;
    const double cost = gemm_small_m_cost(shape, {config.rows, config.columns, config.stage_blocks, splits}, card);
    predictions.add(kernel, cost, {&entry, config, splits});
    if (!best.entry || cost < least) best = {&entry, config, splits}, least = cost;
  }
  predictions.log();
  return best;
}

// Whether a kernel may multiply b by a, and store the transposed product: only fp8 operands have scales there, always,
// and the tensor cores take each operand for one of its dtype.
bool transposes(const GemmProblem& p, const GemmArgs& a) {
  const bool scaled = a.a_scale || a.b_scale, fp8 = a.a.dtype().bits == 8;
  return p.rows == GemmRows::kBatched && !a.bias && p.a_scale_k_stride == 0 && p.b_k_stride == 1 && scaled == fp8 &&
         a.a.dtype() == a.b.dtype();
}

// Whether an entry computes the problem without exchanged operands.
bool takes(const GemmProblem& p, const GemmArgs& a, const GemmConfig& t, int64_t multiprocessors) {
  if (p.rows == GemmRows::kIndices && 128 % t.rows != 0) return false;
  if (t.kind == GemmKind::SMALL_M)
    return p.rows == GemmRows::kBatched && p.batch == 1 && !short_k(p.k, a.a.dtype().bytes(), true);
  if (t.stores == GemmStores::TRANSPOSED || t.stores == GemmStores::WHOLE) return false;
  // A CTA with a single tile has nothing to hide stores behind.
  return t.stores != GemmStores::TMA_HALVES || (p.k % kGemmHalvesStep == 0 && p.k <= kGemmHalvesK &&
                                                stores_vectors(a.out, p, 16) && tiles_of(p, t) > multiprocessors);
}

// Of the kernels for any number of tokens.
Tile wgmma_tile(const Kernel& kernel, const GemmProblem& p, const GemmArgs& a, const GemmShape& shape) {
  const GemmCard card = card_with_clusters(kernel, a.a.device());
  const bool may_transpose = transposes(p, a), aligned = stores_vectors(a.out, p, 16);
  const bool by_rows =
      shape.alone && p.a_scale_k_stride == 0 && (p.a_scale_row_stride != 0 || p.b_scale_row_stride != 0);
  const GemmSmallMShape few{shape.rows, p.n, gemm_ceil(p.k * shape.bytes, 128), p.batch};
  return cheapest_entry<GemmConfig>(kernel, a.tactic, [&](Tile& choice) {
    const GemmConfig& t = choice.config;
    const bool few_tokens = t.kind == GemmKind::SMALL_M, tries_split = choice.transposed;
    if (few_tokens) choice.transposed = false;  // they are exchanged anyway
    GemmShape s = shape;
    if (choice.transposed) std::swap(s.rows, s.n);
    const int64_t clocks = s.alone ? t.alone_clocks : t.k_block_clocks;
    const GemmTiling tiling{t.rows,        t.columns,  clocks,
                            choice.splits, few_tokens, by_rows && !few_tokens && t.stores != GemmStores::TMA};
    // Sums of parts, and whole tiles, are stored by TMA.
    const bool exchanges = t.stores == GemmStores::EITHER || t.stores == GemmStores::TRANSPOSED ||
                           (t.stores == GemmStores::WHOLE && aligned);
    // A split of k would follow the number of tokens, and tiles for few tokens add fp8 in parts of their own. All
    // others add k in one order, exchanged operands or not.
    if (batch_invariant() && (choice.splits > 1 || (few_tokens && shape.bytes == 1))) return -1.0;
    bool fits = false;
    if (!tries_split)
      fits = takes(p, a, t, card.multiprocessors);
    else if (!few_tokens)
      fits = may_transpose && exchanges && (choice.splits == 1 || aligned) && gemm_shares(s, tiling, card);
    else if (choice.splits > 1)
      fits = takes(p, a, t, card.multiprocessors) &&
             gemm_small_m_fits(few, {t.rows, t.columns, t.stage_blocks, choice.splits});
    return fits ? gemm_cost(s, tiling, card) : -1.0;
  });
}

// The entry that computes the problem, and its tile.
Tile tile(const Kernel& kernel, const GemmProblem& p, const GemmArgs& a, const GemmShape& shape, const GemmCard& card) {
  switch (GemmConfig::of(kernel.entries.front()).kind) {
    case GemmKind::MMA:
      return mma_tile(kernel, p, a, shape.rows, card.multiprocessors);
    case GemmKind::SMALL_M:
      return small_m_tile(kernel, p, a, {shape.rows, p.n, gemm_ceil(p.k * shape.bytes, 128), p.batch}, card);
    default:
      return parts_of(p, a) > 1 ? entry_of_parts<GemmConfig>(kernel, shape, parts_of(p, a), a.a.device())
                                : wgmma_tile(kernel, p, a, shape);
  }
}

// The row that the last tile of a matrix begins with. Behind the tile before it may have few rows: it loads less than
// the others with the same weights and runs ahead of them, and L2 has forgotten weights of half of its size when they
// come. There it begins early enough to be full, and computes rows of the tile before again, to the same bits. H200, us
// without and with this, bf16, 8192 x 8192: 129 rows (small m) 58.0 and 46.5, 257 86.9 and 71.4, 513 138 and 126.
int64_t last_row(const GemmCard& card, const GemmProblem& p, int64_t tokens, int64_t rows, int64_t weight_bytes) {
  const int64_t behind = (gemm_ceil(tokens, rows) - 1) * rows;
  if (p.rows != GemmRows::kBatched || behind == 0 || weight_bytes < card.l2_bytes * 8 / 15) return behind;
  const int64_t aligned = p.a_scale_k_stride ? 4 : 1;  // scales of four rows are one copy
  return gemm_ceil(tokens - rows, aligned) * aligned;
}

// What both Hopper kernels read.
GemmSm90Params hopper_params(const Kernel& kernel, const GemmCard& card, const GemmProblem& p, const GemmShape& shape,
                             const GemmConfig& t) {
  GemmSm90Params params{};
  params.problem = p;
  params.k_blocks = static_cast<int32_t>(gemm_ceil(p.k * shape.bytes, 128));
  const int64_t bytes = shape.bytes, batch = one_a(p) ? 1 : p.batch;
  params.last_row = static_cast<int32_t>(last_row(card, p, p.m, t.rows, bytes * p.n * p.k));
  params.last_column = p.n;
  describe_operand(kernel, params.a, p.a, bytes, p.k, p.m, batch, p.a_row_stride, p.a_batch_stride, t.rows);
  if (p.b_k_stride == 1)
    describe_operand(kernel, params.b, p.b, bytes, p.k, p.n, p.matrices, p.b_row_stride, p.b_batch_stride,
                     t.columns / (t.columns > 256 ? 2 : 1));
  else
    describe_operand(kernel, params.b, p.b, bytes, p.n, p.k, p.matrices, p.b_k_stride, p.b_batch_stride, 128 / bytes);
  return params;
}

void launch_gemm(const Kernel& kernel, const GemmProblem& given, const GemmArgs& a) {
  GemmCard card = card_of(kernel, a.a.device());
  const int64_t multiprocessors = card.multiprocessors;
  GemmShape shape{one_a(given) ? gemm_ceil(given.m, given.batch) : given.m,
                  given.n,
                  given.k,
                  given.batch,
                  a.a.dtype().bytes(),
                  a.out.dtype().bytes()};
  if (a.expected_m >= 0) {
    shape.rows = std::max<int64_t>(1, a.expected_m);
    shape.varied = given.rows == GemmRows::kIndptr;
  }
  shape.alone = given.rows == GemmRows::kBatched && given.batch == 1;
  const auto [entry, t, splits, turned] = tile(kernel, given, a, shape, card);
  const GemmProblem p = turned ? transposed(given) : given;
  const int64_t tiles = tiles_of(p, t);
  const int64_t group_m = gemm_group_m({t.rows, t.columns, 0}, multiprocessors);
  Launch launch{std::min(tiles, multiprocessors)};
  launch.pdl = kernel.pdl(a.enable_pdl);
  if (t.kind == GemmKind::MMA) {
    const GemmMmaParams params{
        p,   static_cast<int32_t>(gemm_ceil(p.k * shape.bytes, 64)), static_cast<int32_t>(group_m),
        p.m, stores_vectors(a.out, p, 2 * shape.out_bytes),          gemm_raster(p, t.rows, t.columns, group_m)};
    launch.grid_x = tiles;
    return kernel.launch(*entry, launch, a.a.device(), params);
  }
  GemmSm90Params params = hopper_params(kernel, card, p, shape, t);
  if (t.kind == GemmKind::SMALL_M) {
    params.group_m = static_cast<int32_t>(gemm_ceil(p.m, t.rows));  // a tile of weights meets all tokens in turn
    params.b_once = p.batch * p.n * p.k * shape.bytes < kGemmSmallMEvictFirstBytes;
    params.whole_rows = stores_vectors(a.out, p, 4);
    if (splits > 1) launch.grid_x = tiles * splits;
    launch.cluster = static_cast<unsigned>(splits);
    params.b_constant = a.b_constant;
    params.raster = gemm_raster(p, t.rows, t.columns, params.group_m);
    return kernel.launch(*entry, launch, a.a.device(), params);
  }
  params.whole_rows = stores_vectors(a.out, p, 16);
  const bool by_tma = t.stores == GemmStores::TMA || t.stores == GemmStores::TMA_HALVES;
  params.tma_stores = by_tma && params.whole_rows && tiles > multiprocessors;
  // Elsewhere the map would cost the host time.
  if (turned && (splits > 1 || t.stores == GemmStores::WHOLE))
    describe_operand(kernel, params.out, p.out, shape.out_bytes, p.m, p.n, p.batch, p.out_row_stride,
                     p.out_batch_stride, kGemmBoxColumns);
  else if (params.tma_stores)
    describe_operand(kernel, params.out, p.out, shape.out_bytes, p.n, p.m, one_a(p) ? 1 : p.batch, p.out_row_stride,
                     p.out_batch_stride, 64);
  params.transposed = turned;
  params.splits = static_cast<int32_t>(std::max(splits, parts_of(given, a)));
  params.own_blocks = static_cast<int32_t>(gemm_ceil(params.k_blocks, splits));
  params.own_groups = static_cast<int32_t>(gemm_ceil(t.columns / 16, splits));
  if (turned) params.last_column = static_cast<int32_t>(last_row(card, p, p.n, t.columns, shape.bytes * p.m * p.k));
  card = card_with_clusters(kernel, a.a.device());
  const int64_t whole = gemm_whole_tiles(tiles, splits, card);
  params.whole_tiles = static_cast<int32_t>(whole);
  // What a tile that is shared and one that is not both compute would have the bits of either.
  if (splits > 1 && whole) params.last_row = p.m, params.last_column = p.n;
  if (splits > 1) launch.grid_x = splits * (whole ? card.clusters[splits] : tiles);
  launch.cluster = static_cast<unsigned>(splits);
  params.a_once = turned && p.n <= t.columns;
  params.b_once = !turned && shape.rows <= t.rows;
  // H200, us with groups of 8 and 16 tiles: 8192 x 28672 x 2048 799 and 781, 4096 x 24576 x 1536 257.8 and 255.9.
  // Exchanged, 9625 x 3584 x 512 with groups of 1 and 15: 64.4 and 62.9.
  const bool in_turn = turned && gemm_ceil(p.n, t.columns) <= kGemmFewTokenTiles;
  params.group_m = static_cast<int32_t>(in_turn ? 1 : group_m * (t.stores == GemmStores::TMA_HALVES ? 2 : 1));
  params.raster = gemm_raster(p, t.rows, t.columns, params.group_m);
  launch.shared_bytes = kGemmSharedBytes;
  kernel.launch(*entry, launch, a.a.device(), params);
}
#endif

// Raises unless both scales are of blocks of 128 k, those of a of so many rows and those of b of 128.
void check_block_scales(const GemmArgs& a, const GemmProblem& p) {
  const auto fits = [&](const OptionalTensor& scale, const Tensor& operand, int64_t rows) {
    return scale && scale.ndim() == operand.ndim() && scale.size(-2) == gemm_ceil(operand.size(-2), rows) &&
           scale.size(-1) == p.k / 128;
  };
  FI_CHECK(
      p.k % 128 == 0 && fits(a.a_scale, a.a, a.scale_rows) && fits(a.b_scale, a.b, 128), ValueError,
      "a_scale and b_scale must have one scale for each %lld rows of a, 128 rows of b, and 128 k, a multiple of 128",
      static_cast<long long>(a.scale_rows));
}

// The largest power of 2 up to 16 that divides the addresses of all rows.
int64_t alignment_of(const Tensor& t, bool last_two_swapped) {
  auto low = reinterpret_cast<uintptr_t>(t.data());
  for (int i = 0; i < t.ndim(); ++i)
    if (i != t.ndim() - (last_two_swapped ? 2 : 1)) low |= static_cast<uintptr_t>(t.stride(i) * t.dtype().bytes());
  return low % 16 ? static_cast<int64_t>(low & -low) : 16;
}

// Whether four k of a row of a_scale, of blocks of one row, are 16 aligned bytes.
bool scales_of_four_are_copied(const GemmArgs& a) {
  const int row = a.scales_transposed ? -1 : -2;
  return a.a_scale && a.a_scale.ndim() == a.a.ndim() && a.a_scale.size_or_0(row) == a.a.size_or_0(-2) &&
         a.a_scale.stride_or_0(-3 - row) == 1 && alignment_of(a.a_scale, a.scales_transposed) == 16;
}

GemmRequest request_of(const GemmArgs& a) {
  constexpr int64_t kLargeM = 65;  // more rows count as this many
  using Request = GemmRequest;
  Request r{};
  r.a = a.a.dtype(), r.b = a.b.dtype(), r.out = a.out.dtype();
  const int row = a.b_transposed ? -1 : -2, column = -3 - row;  // of b: n, k
  const int64_t n = a.b.size_or_0(row), k = a.b.size_or_0(column);
  if (a.b_scale && a.b_scale.ndim() == a.b.ndim() && a.b.ndim() >= 2) {
    const int64_t along_n = a.b_scale.size(a.scales_transposed ? -1 : -2);
    const bool one = along_n == 1 && a.b_scale.size(a.scales_transposed ? -2 : -1) == 1;
    if (!one || std::max(n, k) <= 128)
      r.scales = along_n == n && n > 1          ? Request::Scales::kColumnBlocks
                 : scales_of_four_are_copied(a) ? Request::Scales::kRowBlocks
                                                : Request::Scales::kBlocks;
  }
  r.tiles = a.m_indptr || a.masked_m ? Request::Tiles::kGroups : Request::Tiles::kBatched;
  const bool n_major = a.b.stride_or_0(column) != 1 && a.b.stride_or_0(row) == 1 && k > 1;
  r.b_major = n_major ? Request::BMajor::kN : Request::BMajor::kK;
  r.fast_accum = a.use_fast_accum;
  r.alignment = std::min(alignment_of(a.a, false), alignment_of(a.b, n_major != a.b_transposed));
  // Rows of a that meet a matrix of b; of groups their mean.
  int64_t m = a.expected_m >= 0 ? a.expected_m : a.a.size_or_0(-2);
  if (a.expected_m < 0 && (a.m_indptr || a.m_indices)) {
    const int64_t groups = a.m_indptr ? a.m_indptr.numel() - 1 : a.b.size_or_0(0);
    m = gemm_ceil(m, std::max<int64_t>(1, groups));
  }
  r.m = std::min(m, kLargeM);
  r.k = short_k(k, a.b.dtype().bytes(), a.b.ndim() == 2) ? Request::K::kShort : Request::K::kLong;
  const bool batched = r.tiles == Request::Tiles::kBatched && !a.m_indices, of_16_bits = a.a.dtype().bytes() == 2;
  const bool one = batched && of_16_bits && !n_major && (a.a.ndim() == 2 || a.a.size(0) == 1);
  if (batch_invariant() && one && gemm_fixed_parts(n, gemm_ceil(k * 2, 128)) > 1) r.k = Request::K::kParts;
  return r;
}

void gemm(const Kernel& kernel, const GemmArgs& given) {
  // 1 check
  Transposed b, a_scale, b_scale;
  GemmArgs a = given;
  if (batch_invariant()) a.tactic = -1;  // it was tuned for a number of tokens
  if (a.b_transposed) a.b = {given.b.transposed(b), given.b.name()};
  if (a.scales_transposed) {
    a.a_scale = {given.a_scale.transposed(a_scale), given.a_scale.name()};
    a.b_scale = {given.b_scale.transposed(b_scale), given.b_scale.name()};
  }
  const GemmProblem p = problem_of(a);
  if (a.scale_rows) check_block_scales(a, p);
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  if (kernel.checks_contents(a.a.device())) check_tables(kernel, a, p);

  // 2 shape, 3 launch
#if FI_CUDA
  launch_gemm(kernel, p, a);
#else
  (void)kernel, (void)a.expected_m, (void)a.tactic, (void)a.b_constant, (void)a.enable_pdl;
  cpu::gemm(p, a.a.dtype(), a.b.dtype(), a.out.dtype(), batch_invariant());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::gemm, fi::request_of)
