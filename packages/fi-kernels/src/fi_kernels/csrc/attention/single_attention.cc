// Attention of one request, prefill and decode: one contract, the choice between kernels, and the CPU form.
#include "fi/attention/single/single_attention.h"

#include <algorithm>

#include "fi/attention/contract.h"
#include "fi/attention/extras.h"
#include "fi/generated/single_attention.h"

#if !FI_CUDA
#include "fi/attention/cpu/epilogue.h"
#include "fi/attention/cpu/tile.h"
#include "fi/cpu/parallel.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// A unit has an entry of tiles, or entries of rows and combine.
constexpr int64_t kTileColumns = 128;  // of the output, of a CTA of the tiles kernel

const Entry& tile(const Kernel& kernel, const AttentionProblem& p) {
  for (const Entry& entry : kernel.entries)
    if (std::max(p.head_dim_qk, p.head_dim_vo) <= SingleAttentionConfig::of(entry).largest_head_dim) return entry;
  raise("ValueError", "no entry takes head dims %d and %d", p.head_dim_qk, p.head_dim_vo);
}

void launch(const Kernel& kernel, const SingleAttentionParams& params, const Extras& extras, DLDevice device) {
  const AttentionProblem& p = params.problem;
  const Entry& entry = tile(kernel, p);
  const auto chosen = SingleAttentionConfig::of(entry);
  FI_CHECK(chosen.step != AttentionStep::COMBINE, ValueError, "few must be False for head dims %d and %d",
           p.head_dim_qk, p.head_dim_vo);
  const bool tiles = chosen.step == AttentionStep::MMA;
  FI_CHECK(!tiles || params.num_splits == 1, ValueError, "workspace must be None when few is False; got %d chunks",
           params.num_splits);
  Launch config{(p.rows() + chosen.rows_per_cta - 1) / chosen.rows_per_cta, p.kv_heads,
                tiles ? (p.head_dim_vo + kTileColumns - 1) / kTileColumns : params.num_splits};
  config.pdl = kernel.pdl(-1);
  kernel.launch(entry, config, device, params, extras.data());
  if (params.num_splits == 1) return;
  config.grid_x = static_cast<int64_t>(p.mask.qo_len) * p.qo_heads;
  config.grid_y = config.grid_z = 1;
  kernel.launch(kernel.entries.back(), config, device, params, extras.data());
}
#else
KeyRange keys_of(const Mask& mask, int32_t first, int32_t last) { return {mask.first_key(first), mask.end_key(last)}; }

// Merges the partials of the splits of a row.
void combine(const SingleAttentionParams& params, Variant& variant, Row row, std::vector<float>& o, DType out) {
  const AttentionProblem& p = params.problem;
  float row_max = kMinusInf, row_sum = 0.f;
  std::fill(o.begin(), o.end(), 0.f);
  for (int32_t c = 0; c < params.num_splits; ++c) row_max = std::max(row_max, params.partial(c, row)[p.head_dim_vo]);
  for (int32_t c = 0; c < params.num_splits; ++c) {
    const float* part = params.partial(c, row);
    const float rescale = softmax_exp2<CpuMath>(part[p.head_dim_vo], softmax_reference(row_max));
    row_sum += rescale * part[p.head_dim_vo + 1];
    cpu::add_scaled<16>(o.data(), part, rescale, p.head_dim_vo);
  }
  store_row(p, variant, nullptr, row, row_max, row_sum, o.data(), out);
}

void run_cpu(const SingleAttentionParams& params, const Variant::Arguments& arguments, DType q, DType kv, DType out) {
  const AttentionProblem& p = params.problem;
  Variant::Params variant_params;
  variant_params.set(arguments, p);
  const int32_t tile_rows = CpuTile::kRows, tiles = (p.rows() + tile_rows - 1) / tile_rows;
  const int64_t work_tiles = static_cast<int64_t>(p.kv_heads) * tiles * params.num_splits;
  const double work = static_cast<double>(p.rows()) * p.kv_heads * p.mask.kv_len * (p.head_dim_qk + p.head_dim_vo);
  const int64_t grain = 1 + static_cast<int64_t>(2e5 / (work / static_cast<double>(work_tiles) + 1));
  cpu::parallel_for(work_tiles, grain, [&](int64_t begin, int64_t end) {
    const int32_t most = CpuTile::heads(p.rows());
    CpuTile tile(p, q, kv, std::min(tile_rows, most * p.rows()), cpu::KvRowProducts::of(kv));
    Variant variant(variant_params, 0);
    for (int64_t work_tile = begin, heads; work_tile < end; work_tile += heads) {
      const auto kv_head = static_cast<int32_t>(work_tile % p.kv_heads),
                 split = static_cast<int32_t>(work_tile / p.kv_heads % params.num_splits);
      const auto t = static_cast<int32_t>(work_tile / p.kv_heads / params.num_splits);
      // First, last, second, ...: under a causal mask each thread's share then costs about the same.
      const int32_t first = (t % 2 ? tiles - 1 - t / 2 : t / 2) * tile_rows,
                    rows = std::min(tile_rows, p.rows() - first);
      const KeyRange all = keys_of(p.mask, first / p.group(), (first + rows - 1) / p.group());
      const KeyRange keys = split_keys(all, split, params.num_splits);
      heads = std::min<int64_t>({most, p.kv_heads - kv_head, end - work_tile});
      tile.attend(p, TokenPages::one(), variant, kv_head, first, rows, keys.begin, keys.end,
                  static_cast<int32_t>(heads));
      for (int32_t r = 0; r < rows * heads; ++r) {
        const Row row = tile.row(r);
        if (params.num_splits == 1) {
          store_row(p, variant, nullptr, row, tile.row_max(r), tile.row_sum(r), tile.output(r), out);
        } else {
          float* part = params.partial(split, row);
          std::copy_n(tile.output(r), p.head_dim_vo, part);
          part[p.head_dim_vo] = tile.row_max(r), part[p.head_dim_vo + 1] = tile.row_sum(r);
        }
      }
    }
  });
  if (params.num_splits == 1) return;
  const int64_t rows = static_cast<int64_t>(p.mask.qo_len) * p.qo_heads;
  cpu::parallel_for(rows, 1 + 65536 / (static_cast<int64_t>(params.num_splits) * p.head_dim_vo),
                    [&](int64_t begin, int64_t end) {
                      Variant variant(variant_params, 0);
                      std::vector<float> o(static_cast<size_t>(p.head_dim_vo));
                      for (int64_t r = begin; r < end; ++r)
                        combine(params, variant,
                                {static_cast<int32_t>(r / p.qo_heads), static_cast<int32_t>(r % p.qo_heads)}, o, out);
                    });
}
#endif

Mask mask_of(const OptionalTensor& custom, const OptionalTensor& packed, const Tensor& q, Dim& qo_len, Dim& kv_len,
             bool causal) {
  Mask mask{};
  mask.qo_len = static_cast<int32_t>(qo_len), mask.kv_len = static_cast<int32_t>(kv_len);
  mask.causal = causal && !custom && !packed;
  if (packed) {
    packed.is({kU8}).on(q).contiguous();
    const int64_t bytes = (qo_len * kv_len + 7) / 8;
    FI_CHECK(packed.ndim() == 1 && packed.numel() >= bytes, ValueError,
             "packed_custom_mask must have shape [n] with n >= ceil(qo_len * kv_len / 8) = %lld; got %s",
             static_cast<long long>(bytes), packed.shape_str().c_str());
    mask.custom = packed.data<const uint8_t>();
    mask.custom_row = kv_len;
    mask.custom_packed = 1;
  } else if (custom) {
    custom.is({kBool}).on(q).inner_contiguous().shape(qo_len, kv_len);
    mask.custom = custom.data<const uint8_t>();
    mask.custom_row = custom.stride(0);
  }
  FI_CHECK(!mask.causal || kv_len >= qo_len, ValueError,
           "k must have at least as many tokens as q when causal: qo_len = %lld, kv_len = %lld",
           static_cast<long long>(qo_len), static_cast<long long>(kv_len));
  return mask;
}

SingleAttentionRequest request_of(const SingleAttentionArgs& a) {
  constexpr int64_t kMany = 1024;  // more query tokens count as this many
  SingleAttentionRequest r{};
  r.q = a.q.dtype(), r.kv = a.k.dtype(), r.out = a.out.dtype();
  r.head_dim_qk = a.q.size_or_0(-1), r.head_dim_vo = a.v.size_or_0(-1);
  const int64_t kv_heads = a.k.ndim() == 3 ? a.k.size_or_0(a.kv_layout == 0 ? 1 : 0) : 0;
  r.group_size = kv_heads > 0 ? a.q.size_or_0(-2) / kv_heads : 0;
  r.alignment = 16;  // its kernels take all
  r.qo_len = a.q.ndim() == 3 ? std::min(a.q.size(0), kMany) : 1;
  return r;
}

void single_attention(const Kernel& kernel, const SingleAttentionArgs& a, const Extras& extras) {
  // 1 check
  extras.check_apart({&a.out, &a.lse, &a.workspace});
  Dim qo_len{"qo_len", 1}, kv_len{"kv_len"};
  AttentionDims dims;
  auto& [qo_heads, kv_heads, head_dim_qk, head_dim_vo] = dims;
  const bool one = a.q.ndim() == 2;  // decode: a single row
  if (one) {
    a.q.shape(qo_heads, head_dim_qk);
  } else {
    qo_len.value = -1;
    a.q.shape(qo_len, qo_heads, head_dim_qk);
  }
  const bool nhd = a.kv_layout == 0;
  if (nhd) {
    a.k.shape(kv_len, kv_heads, head_dim_qk);
    a.v.shape(kv_len, kv_heads, head_dim_vo);
  } else {
    a.k.shape(kv_heads, kv_len, head_dim_qk);
    a.v.shape(kv_heads, kv_len, head_dim_vo);
  }
  check_attention(a, a.k, a.v, dims, false);
  constexpr int64_t largest = 0x7fff0000;  // 32-bit counters have room for a tile beyond the end
  FI_CHECK(qo_len * qo_heads <= largest && kv_len <= largest, ValueError, "too large: q has shape %s, k has shape %s",
           a.q.shape_str().c_str(), a.k.shape_str().c_str());
  a.q.inner_contiguous();
  a.k.inner_contiguous();
  a.v.inner_contiguous();
  a.out.inner_contiguous();
  if (one) {
    a.out.shape(qo_heads, head_dim_vo);
    if (a.lse) a.lse.is({kF32}).on(a.q).contiguous().shape(qo_heads);
  } else {
    a.out.shape(qo_len, qo_heads, head_dim_vo);
    if (a.lse) a.lse.is({kF32}).on(a.q).contiguous().shape(qo_len, qo_heads);
  }

  // 2 shape
  SingleAttentionParams params{};
  AttentionProblem& p = params.problem;
  p.mask = mask_of(a.custom_mask, a.packed_custom_mask, a.q, qo_len, kv_len, a.causal);
  fill_attention(p, a, a.k, a.v, dims);
  params.num_splits = 1;
  if (a.workspace) {
    Dim chunks{"chunks"}, rows{"qo_len * num_qo_heads", qo_len * qo_heads}, width{"head_dim_vo + 2", head_dim_vo + 2};
    a.workspace.is({kF32}).on(a.q).contiguous().shape(chunks, rows, width);
    FI_CHECK(chunks >= 1 && chunks <= 1024, ValueError, "workspace must have 1 to 1024 chunks; got shape %s",
             a.workspace.shape_str().c_str());
    params.num_splits = static_cast<int32_t>(chunks);
    params.workspace = a.workspace.data<float>();
  }
  if (qo_len == 0 || qo_heads == 0) return;

  // 3 launch
#if FI_CUDA
  p.aligned = rows_aligned(p, a.q, a.k, a.v, 0, 0);
  launch(kernel, params, extras, a.q.device());
#else
  (void)kernel;
  run_cpu(params, variant_arguments(extras), a.q.dtype(), a.k.dtype(), a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::single_attention, fi::request_of)
