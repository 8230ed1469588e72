// Attention of one request, prefill and decode: one contract, the choice between kernels, and the CPU form.
#include "fi/attention/single_attention.h"

#include <algorithm>

#include "fi/attention/contract.h"
#include "fi/host/op.h"

#if !FI_CUDA
#include "fi/attention/cpu_finish.h"
#include "fi/attention/cpu_tile.h"
#include "fi/cpu/parallel.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// config = {kind, largest head dim, packed rows a block}; a unit has tiles, or rows and combine.
enum Kind { kTiles = 0, kRows = 1, kCombine = 2 };

constexpr int64_t kTileColumns = 128;  // of the output, a block of the tiles kernel

void launch(const Kernel& kernel, const SingleAttentionParams& params, const Extras& extras, DLDevice device) {
  const AttentionProblem& p = params.problem;
  const auto fits = [&](const Entry& entry) { return std::max(p.dim_qk, p.dim_vo) <= entry.config[1]; };
  const auto entry = std::find_if(kernel.entries.begin(), kernel.entries.end(), fits);
  FI_CHECK(entry != kernel.entries.end() && entry->config[0] != kCombine, ValueError,
           "few must be False for head dims %d and %d", p.dim_qk, p.dim_vo);
  const bool tiles = entry->config[0] == kTiles;
  FI_CHECK(!tiles || params.chunks == 1, ValueError, "workspace must be None when few is False; got %d chunks",
           params.chunks);
  Launch config{(p.rows() + entry->config[2] - 1) / entry->config[2], p.kv_heads,
                tiles ? (p.dim_vo + kTileColumns - 1) / kTileColumns : params.chunks};
  config.pdl = kernel.pdl(-1);
  kernel.launch(*entry, config, device, params, extras.data());
  if (params.chunks == 1) return;
  config.grid_x = static_cast<int64_t>(p.mask.qo_len) * p.qo_heads;
  config.grid_y = config.grid_z = 1;
  kernel.launch(kernel.entries.back(), config, device, params, extras.data());
}
#else
KeyRange keys_of(const Mask& mask, int32_t first, int32_t last) { return {mask.first_key(first), mask.end_key(last)}; }

// Merges the parts that the chunks of a row left.
void combine(const SingleAttentionParams& params, Variant& variant, Row row, std::vector<float>& o, DType out) {
  const AttentionProblem& p = params.problem;
  float m = kMinusInf, d = 0.f;
  std::fill(o.begin(), o.end(), 0.f);
  for (int32_t c = 0; c < params.chunks; ++c) m = std::max(m, params.partial(c, row)[p.dim_vo]);
  for (int32_t c = 0; c < params.chunks; ++c) {
    const float* part = params.partial(c, row);
    const float weight = softmax_weight<CpuMath>(part[p.dim_vo], softmax_base(m));
    d += weight * part[p.dim_vo + 1];
    cpu::add_scaled<16>(o.data(), part, weight, p.dim_vo);
  }
  finish_row(p, variant, nullptr, row, m, d, o.data(), out);
}

void run_cpu(const SingleAttentionParams& params, const Variant::Arguments& arguments, DType q, DType kv, DType out) {
  const AttentionProblem& p = params.problem;
  Variant::Params variant_params;
  variant_params.set(arguments, p);
  const int32_t tile_rows = CpuTile::kRows, tiles = (p.rows() + tile_rows - 1) / tile_rows;
  const int64_t items = static_cast<int64_t>(p.kv_heads) * tiles * params.chunks;
  const double work = static_cast<double>(p.rows()) * p.kv_heads * p.mask.kv_len * (p.dim_qk + p.dim_vo);
  const int64_t grain = 1 + static_cast<int64_t>(2e5 / (work / static_cast<double>(items) + 1));
  cpu::parallel_for(items, grain, [&](int64_t begin, int64_t end) {
    const int32_t most = CpuTile::heads(p.rows());
    CpuTile tile(p, q, kv, std::min(tile_rows, most * p.rows()), cpu::LineProducts::of(kv));
    Variant variant(variant_params, 0);
    for (int64_t item = begin, heads; item < end; item += heads) {
      const auto kv_head = static_cast<int32_t>(item % p.kv_heads),
                 chunk = static_cast<int32_t>(item / p.kv_heads % params.chunks);
      const auto t = static_cast<int32_t>(item / p.kv_heads / params.chunks);
      // First, last, second, ...: under a causal mask each thread's share then costs about the same.
      const int32_t first = (t % 2 ? tiles - 1 - t / 2 : t / 2) * tile_rows,
                    rows = std::min(tile_rows, p.rows() - first);
      const KeyRange all = keys_of(p.mask, first / p.group, (first + rows - 1) / p.group);
      const KeyRange keys = chunk_of(all, chunk, params.chunks);
      heads = std::min<int64_t>({most, p.kv_heads - kv_head, end - item});
      tile.attend(p, TokenPages::one(), variant, kv_head, first, rows, keys.begin, keys.end,
                  static_cast<int32_t>(heads));
      for (int32_t r = 0; r < rows * heads; ++r) {
        const Row row = tile.row(r);
        if (params.chunks == 1) {
          finish_row(p, variant, nullptr, row, tile.m(r), tile.d(r), tile.output(r), out);
        } else {
          float* part = params.partial(chunk, row);
          std::copy_n(tile.output(r), p.dim_vo, part);
          part[p.dim_vo] = tile.m(r), part[p.dim_vo + 1] = tile.d(r);
        }
      }
    }
  });
  if (params.chunks == 1) return;
  const int64_t rows = static_cast<int64_t>(p.mask.qo_len) * p.qo_heads;
  cpu::parallel_for(rows, 1 + 65536 / (static_cast<int64_t>(params.chunks) * p.dim_vo),
                    [&](int64_t begin, int64_t end) {
                      Variant variant(variant_params, 0);
                      std::vector<float> o(static_cast<size_t>(p.dim_vo));
                      for (int64_t r = begin; r < end; ++r)
                        combine(params, variant,
                                {static_cast<int32_t>(r / p.qo_heads), static_cast<int32_t>(r % p.qo_heads)}, o, out);
                    });
}
#endif

Mask mask_of(const OptionalTensor& custom, const OptionalTensor& packed, const Tensor& q, Dim& qo_len, Dim& kv_len,
             bool causal, int64_t window_left) {
  Mask mask{};
  mask.qo_len = static_cast<int32_t>(qo_len), mask.kv_len = static_cast<int32_t>(kv_len);
  mask.window_left = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(window_left, -1), 0x7fffffff));
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

void single_attention(const Kernel& kernel, Tensor out, OptionalTensor lse, OptionalTensor workspace, Tensor q,
                      Tensor k, Tensor v, OptionalTensor custom_mask, OptionalTensor packed_custom_mask,
                      OptionalTensor scale_q, OptionalTensor scale_k, OptionalTensor scale_v, int64_t kv_layout,
                      int64_t pos_encoding, int64_t causal, int64_t window_left, double logits_soft_cap,
                      double sm_scale, double v_scale, double rope_scale, double rope_theta, int64_t few,
                      Extras extras) {
  // 1 check
  Dim qo_len{"qo_len", 1}, kv_len{"kv_len"}, qo_heads{"num_qo_heads"}, kv_heads{"num_kv_heads"}, dim_qk{"head_dim_qk"},
      dim_vo{"head_dim_vo"};
  const bool one = q.ndim() == 2;  // decode: a single row
  if (one) {
    q.shape(qo_heads, dim_qk);
  } else {
    qo_len.value = -1;
    q.shape(qo_len, qo_heads, dim_qk);
  }
  const bool nhd = kv_layout == 0;
  if (nhd) {
    k.shape(kv_len, kv_heads, dim_qk);
    v.shape(kv_len, kv_heads, dim_vo);
  } else {
    k.shape(kv_heads, kv_len, dim_qk);
    v.shape(kv_heads, kv_len, dim_vo);
  }
  check_dtypes(q, k, v, out);
  check_head_dim(q, dim_qk);
  check_head_dim(v, dim_vo);
  FI_CHECK(kv_heads > 0 && qo_heads % kv_heads == 0, ValueError,
           "q must have a multiple of k's heads: num_qo_heads = %lld, num_kv_heads = %lld",
           static_cast<long long>(qo_heads), static_cast<long long>(kv_heads));
  constexpr int64_t largest = 0x7fff0000;  // 32-bit counters have room for a tile beyond the end
  FI_CHECK(qo_len * qo_heads <= largest && kv_len <= largest, ValueError, "too large: q has shape %s, k has shape %s",
           q.shape_str().c_str(), k.shape_str().c_str());
  FI_CHECK(rope_scale > 0 && rope_theta > 0, ValueError, "rope_scale and rope_theta must be positive; got %g and %g",
           rope_scale, rope_theta);
  q.inner_contiguous();
  k.inner_contiguous();
  v.inner_contiguous();
  out.inner_contiguous();
  if (one) {
    out.shape(qo_heads, dim_vo);
    if (lse) lse.is({kF32}).on(q).contiguous().shape(qo_heads);
  } else {
    out.shape(qo_len, qo_heads, dim_vo);
    if (lse) lse.is({kF32}).on(q).contiguous().shape(qo_len, qo_heads);
  }

  // 2 shape
  SingleAttentionParams params{};
  AttentionProblem& p = params.problem;
  p.mask = mask_of(custom_mask, packed_custom_mask, q, qo_len, kv_len, causal != 0, window_left);
  p.scale_q = factors(scale_q, q, qo_heads);
  p.scale_k = factors(scale_k, q, kv_heads);
  p.scale_v = factors(scale_v, q, kv_heads);
  p.q = q.data();
  p.k = k.data();
  p.v = v.data();
  p.out = out.data();
  p.lse = lse ? lse.data<float>() : nullptr;
  p.q_token = one ? 0 : q.stride(0);
  p.q_head = q.stride(-2);
  p.k_token = k.stride(nhd ? 0 : 1);
  p.k_head = k.stride(nhd ? 1 : 0);
  p.v_token = v.stride(nhd ? 0 : 1);
  p.v_head = v.stride(nhd ? 1 : 0);
  p.out_token = one ? 0 : out.stride(0);
  p.out_head = out.stride(-2);
  p.qo_heads = static_cast<int32_t>(qo_heads);
  p.kv_heads = static_cast<int32_t>(kv_heads);
  p.group = static_cast<int32_t>(qo_heads / kv_heads);
  p.dim_qk = static_cast<int32_t>(dim_qk);
  p.dim_vo = static_cast<int32_t>(dim_vo);
  p.out_type = out_type(out.dtype());
  p.out_scale = static_cast<float>(v_scale);
  p.scores = {static_cast<float>(sm_scale), static_cast<float>(logits_soft_cap), pos_encoding == kAlibi};
  if (pos_encoding == kRopeOnTheFly) p.rotary = rotary(dim_qk, rope_scale, rope_theta);
  params.chunks = 1;
  if (workspace) {
    Dim chunks{"chunks"}, rows{"qo_len * num_qo_heads", qo_len * qo_heads}, width{"head_dim_vo + 2", dim_vo + 2};
    workspace.is({kF32}).on(q).contiguous().shape(chunks, rows, width);
    FI_CHECK(chunks >= 1 && chunks <= 1024, ValueError, "workspace must have 1 to 1024 chunks; got shape %s",
             workspace.shape_str().c_str());
    params.chunks = static_cast<int32_t>(chunks);
    params.workspace = workspace.data<float>();
  }
  if (qo_len == 0 || qo_heads == 0) return;

  // 3 launch
  (void)few;  // says which unit is bound
#if FI_CUDA
  const auto aligned = [](const Tensor& t, int64_t token, int64_t head) {
    const int64_t bytes =
        std::min<int64_t>(16, 8 * t.dtype().bytes());  // of one load: 8 elements, in two loads for fp32
    return t.alignment(bytes, {token, head}) == bytes;
  };
  p.aligned = aligned(q, p.q_token, p.q_head) && aligned(k, p.k_token, p.k_head) && aligned(v, p.v_token, p.v_head);
  launch(kernel, params, extras, q.device());
#else
  (void)kernel;
  run_cpu(params, variant_arguments(extras), q.dtype(), k.dtype(), out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::single_attention, "out", "lse", "workspace", "q", "k", "v", "custom_mask", "packed_custom_mask", "scale_q",
      "scale_k", "scale_v", "kv_layout", "pos_encoding_mode", "causal", "window_left", "logits_soft_cap", "sm_scale",
      "v_scale", "rope_scale", "rope_theta", "few")
