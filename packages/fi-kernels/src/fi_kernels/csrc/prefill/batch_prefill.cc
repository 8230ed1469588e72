// batch_prefill: attention of all query tokens of every request over its paged or ragged keys, tile by tile.
#include "fi/prefill/batch_prefill.h"

#include "fi/attention/contract.h"
#include "fi/prefill/prefill_problem.h"

#if FI_CUDA
#include "fi/prefill/launch.h"
#else
#include "fi/prefill/cpu_batch.h"
#endif

namespace fi {
namespace {

void batch_prefill(const Kernel& kernel, Tensor out, OptionalTensor lse, Tensor schedule, OptionalTensor workspace,
                   Tensor q, Tensor k, Tensor v, OptionalTensor page_indices, OptionalTensor custom_mask,
                   OptionalTensor mask_indptr, OptionalTensor prefix_len, OptionalTensor items, OptionalTensor sinks,
                   OptionalTensor scale_q, OptionalTensor scale_k, OptionalTensor scale_v, OptionalTensor bmm1_scale,
                   OptionalTensor bmm2_scale, int64_t batch_size, int64_t tile_tokens, int64_t kv_tokens,
                   int64_t clear_rest, int64_t kv_layout, int64_t pos_encoding, int64_t causal, int64_t window_left,
                   double logits_soft_cap, double sm_scale, double v_scale, double rope_scale, double rope_theta,
                   int64_t enable_pdl, std::string impl, Extras extras) {
  // 1 check
  Dim rows{"qo_tokens"}, pages{"num_pages", 1}, page_size{"page_size"}, qo_heads{"num_qo_heads"},
      kv_heads{"num_kv_heads"}, dim_qk{"head_dim_qk"}, dim_vo{"head_dim_vo"}, words{"words"};
  const bool nhd = kv_layout == 0, paged = static_cast<bool>(page_indices);
  q.inner_contiguous().shape(rows, qo_heads, dim_qk);
  Dim &second = nhd ? page_size : kv_heads, &third = nhd ? kv_heads : page_size;
  if (paged) {
    pages.value = -1;
    k.inner_contiguous().shape(pages, second, third, dim_qk);
    v.inner_contiguous().shape(pages, second, third, dim_vo);
    page_indices.is({kI32}).on(q).contiguous();
  } else {
    k.inner_contiguous().shape(second, third, dim_qk);
    v.inner_contiguous().shape(second, third, dim_vo);
  }
  out.inner_contiguous().shape(rows, qo_heads, dim_vo);
  if (lse) lse.is({kF32}).on(q).contiguous().shape(rows, qo_heads);
  check_dtypes(q, k, v, out);
  check_head_dim(q, dim_qk);
  check_head_dim(v, dim_vo);
  FI_CHECK(kv_heads > 0 && qo_heads % kv_heads == 0, ValueError,
           "q must have a multiple of k's heads: num_qo_heads = %lld, num_kv_heads = %lld",
           static_cast<long long>(qo_heads), static_cast<long long>(kv_heads));
  FI_CHECK(!paged || (page_size > 0 && page_size <= 0x7fffffff), ValueError, "k must have page_size > 0; got %s",
           k.shape_str().c_str());
  constexpr int64_t largest = 0x7fff0000;  // 32-bit counters have room for a tile beyond the end
  FI_CHECK(rows * qo_heads <= largest && (paged || page_size <= largest), ValueError,
           "too large: q has shape %s, k has shape %s", q.shape_str().c_str(), k.shape_str().c_str());
  FI_CHECK(rope_scale > 0 && rope_theta > 0, ValueError, "rope_scale and rope_theta must be positive; got %g and %g",
           rope_scale, rope_theta);
  FI_CHECK(tile_tokens > 0 && tile_tokens <= largest, ValueError, "tile_tokens must be positive; got %lld",
           static_cast<long long>(tile_tokens));
  schedule.is({kI32}).on(q).contiguous().shape(words);
  const int64_t least = PrefillSchedule::words(batch_size, rows / tile_tokens + batch_size);
  FI_CHECK(batch_size >= 0 && words >= least, ValueError, "schedule must have %lld words or more; got %lld",
           static_cast<long long>(least), static_cast<long long>(words));
  if (workspace) {
    workspace.is({kU8}).on(q).contiguous();
    FI_CHECK(reinterpret_cast<uintptr_t>(workspace.data()) % 16 == 0, ValueError,
             "workspace must begin at a multiple of 16 bytes");
  }
  Dim batch{"batch_size", batch_size}, bounds{"batch_size + 1", batch_size + 1}, bytes{"bytes"}, items_row{"items"};
  if (custom_mask) custom_mask.is({kU8}).on(q).contiguous();
  if (custom_mask && mask_indptr) {
    custom_mask.shape(bytes);
    mask_indptr.is({kI32}).on(q).contiguous().shape(bounds);
  } else if (custom_mask) {
    custom_mask.shape(rows, bytes);
  }
  if (items) {
    FI_CHECK(prefix_len, ValueError, "prefix_len must be given with items");
    prefix_len.is({kI32, kU32}).on(q).contiguous().shape(batch);
    items.is({kU16}).on(q).contiguous().shape(batch, items_row);
  }

  // 2 shape
  PrefillProblem params{};
  AttentionProblem& p = params.problem;
  params.sinks = factors(sinks, q, qo_heads);
  p.scale_q = factors(scale_q, q, qo_heads);
  p.scale_k = factors(scale_k, q, kv_heads);
  p.scale_v = factors(scale_v, q, kv_heads);
  p.q = q.data();
  p.k = k.data();
  p.v = v.data();
  p.out = out.data();
  p.lse = lse ? lse.data<float>() : nullptr;
  p.q_token = q.stride(0);
  p.q_head = q.stride(1);
  const int token = nhd ? -3 : -2, head = nhd ? -2 : -3;
  p.k_token = k.stride(token);
  p.k_head = k.stride(head);
  p.v_token = v.stride(token);
  p.v_head = v.stride(head);
  p.out_token = out.stride(0);
  p.out_head = out.stride(1);
  p.qo_heads = static_cast<int32_t>(qo_heads);
  p.kv_heads = static_cast<int32_t>(kv_heads);
  p.group = static_cast<int32_t>(qo_heads / kv_heads);
  p.dim_qk = static_cast<int32_t>(dim_qk);
  p.dim_vo = static_cast<int32_t>(dim_vo);
  p.out_type = out_type(out.dtype());
  p.out_scale = static_cast<float>(v_scale);
  p.mask.causal = items || (causal && !custom_mask);
  p.mask.window_left = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(window_left, -1), 0x7fffffff));
  p.scores = {static_cast<float>(sm_scale), static_cast<float>(logits_soft_cap), pos_encoding == kAlibi};
  if (pos_encoding == kRopeOnTheFly) p.rotary = rotary(dim_qk, rope_scale, rope_theta);
  params.k_page = paged ? k.stride(0) : 0;
  params.v_page = paged ? v.stride(0) : 0;
  params.pages = paged ? page_indices.data<const int32_t>() : nullptr;
  params.schedule = PrefillSchedule::at(schedule.data<int32_t>(), batch_size);
  params.parts = workspace ? static_cast<float*>(workspace.data()) : nullptr;
  if (items) {
    params.prefix_len = prefix_len.data<const int32_t>();
    params.items = items.data<const uint16_t>();
    params.items_row = static_cast<int32_t>(items_row);
  } else if (custom_mask) {
    params.custom_mask = custom_mask.data<const uint8_t>();
    params.mask_indptr = mask_indptr ? mask_indptr.data<const int32_t>() : nullptr;
    params.draft_row = mask_indptr ? 0 : static_cast<int32_t>(bytes);
  }
  params.bmm1_scale = scalar(bmm1_scale, q);
  params.bmm2_scale = scalar(bmm2_scale, q);
  params.page_size = divisor(static_cast<uint32_t>(paged ? page_size.value : 1));
  params.tile_tokens = static_cast<int32_t>(tile_tokens);
  params.rest_rows = clear_rest ? static_cast<int32_t>(rows) : 0;
  params.batch = static_cast<int32_t>(batch_size);
  if (rows == 0 || qo_heads == 0) return;
  p.by_group = divisor(static_cast<uint32_t>(p.group));

  // 3 launch
  (void)impl;  // says which unit is bound
#if FI_CUDA
  const auto load = [](const Tensor& t) { return std::min<int64_t>(16, 8 * t.dtype().bytes()); };
  p.aligned = q.alignment(load(q), {p.q_token, p.q_head}) == load(q) &&
              k.alignment(load(k), {params.k_page, p.k_token, p.k_head}) == load(k) &&
              v.alignment(load(v), {params.v_page, p.v_token, p.v_head}) == load(v);
  if (kv_tokens <= 0) kv_tokens = paged ? page_indices.numel() * page_size : page_size.value;
  launch_batch_prefill(kernel, params, extras, q, k, page_size, kv_tokens, batch_size, kernel.pdl(enable_pdl));
#else
  (void)kernel, (void)enable_pdl, (void)kv_tokens;
  CpuBatchPrefill(params, variant_arguments(extras), q.dtype(), k.dtype(), out.dtype()).run();
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::batch_prefill, "out", "lse", "schedule", "workspace", "q", "k", "v", "page_indices", "custom_mask",
      "mask_indptr", "prefix_len", "items", "sinks", "scale_q", "scale_k", "scale_v", "bmm1_scale", "bmm2_scale",
      "batch_size", "tile_tokens", "kv_tokens", "clear_rest", "kv_layout", "pos_encoding_mode", "causal", "window_left",
      "logits_soft_cap", "sm_scale", "v_scale", "rope_scale", "rope_theta", "enable_pdl", "impl")
