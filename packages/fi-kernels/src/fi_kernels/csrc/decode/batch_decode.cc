// batch_decode: attention of a few query rows of every request over its paged keys, as a schedule divides it.
#include "fi/decode/batch_decode.h"

#include "fi/attention/contract.h"

#if FI_CUDA
#include "fi/decode/launch.h"
#else
#include "fi/decode/cpu_batch.h"
#endif

namespace fi {
namespace {

void batch_decode(const Kernel& kernel, Tensor out, OptionalTensor lse, Tensor workspace, Tensor schedule, Tensor q,
                  Tensor k_cache, Tensor v_cache, Tensor page_indices, OptionalTensor sinks, OptionalTensor scale_q,
                  OptionalTensor scale_k, OptionalTensor scale_v, OptionalTensor bmm1_scale, OptionalTensor bmm2_scale,
                  OptionalTensor draft_mask, OptionalTensor qo_indptr, int64_t kv_layout, int64_t pos_encoding,
                  int64_t q_len, int64_t blocks, int64_t ranges, int64_t split, int64_t window_left,
                  double logits_soft_cap, double sm_scale, double v_scale, double rope_scale, double rope_theta,
                  int64_t enable_pdl, std::string impl, Extras extras) {
  // 1 check
  Dim rows{"tokens"}, pages{"num_pages"}, page_size{"page_size"}, qo_heads{"num_qo_heads"}, kv_heads{"num_kv_heads"},
      dim_qk{"head_dim_qk"}, dim_vo{"head_dim_vo"}, words{"words"};
  const bool nhd = kv_layout == 0;
  q.inner_contiguous().shape(rows, qo_heads, dim_qk);
  k_cache.inner_contiguous().shape(pages, nhd ? page_size : kv_heads, nhd ? kv_heads : page_size, dim_qk);
  v_cache.inner_contiguous().shape(pages, nhd ? page_size : kv_heads, nhd ? kv_heads : page_size, dim_vo);
  out.inner_contiguous().shape(rows, qo_heads, dim_vo);
  if (lse) lse.is({kF32}).on(q).contiguous().shape(rows, qo_heads);
  check_dtypes(q, k_cache, v_cache, out);
  check_head_dim(q, dim_qk);
  check_head_dim(v_cache, dim_vo);
  FI_CHECK(kv_heads > 0 && qo_heads % kv_heads == 0, ValueError,
           "q must have a multiple of k_cache's heads: num_qo_heads = %lld, num_kv_heads = %lld",
           static_cast<long long>(qo_heads), static_cast<long long>(kv_heads));
  FI_CHECK(page_size > 0 && page_size <= 0x7fffffff, ValueError, "k_cache must have page_size > 0; got %s",
           k_cache.shape_str().c_str());
  FI_CHECK(q_len > 0 && (qo_indptr || rows % q_len == 0), ValueError,
           "q must have a multiple of q_len = %lld rows; got %s", static_cast<long long>(q_len), q.shape_str().c_str());
  FI_CHECK(rows * qo_heads <= 0x7fff0000, ValueError, "q is too large: %s", q.shape_str().c_str());
  FI_CHECK(rope_scale > 0 && rope_theta > 0, ValueError, "rope_scale and rope_theta must be positive; got %g and %g",
           rope_scale, rope_theta);
  Dim starts{"batch_size + 1"};
  if (qo_indptr) qo_indptr.is({kI32}).on(q).contiguous().shape(starts);
  const int64_t batch = qo_indptr ? std::max<int64_t>(starts - 1, 0) : rows / q_len;
  page_indices.is({kI32}).on(q).contiguous();
  schedule.is({kI32}).on(q).contiguous().shape(words);
  const int64_t least = decode_counters_offset(ranges, batch) + 2 * ranges;
  FI_CHECK(blocks > 0 && blocks <= ranges && ranges <= kDecodeMostRanges && words >= least, ValueError,
           "schedule must have %lld words or more for %lld blocks and %lld ranges; got %lld",
           static_cast<long long>(least), static_cast<long long>(blocks), static_cast<long long>(ranges),
           static_cast<long long>(words));
  Dim slots{"slots"}, tile_rows{"16", kDecodeRows}, width{"head_dim_vo + 2", dim_vo + 2};
  workspace.is({kF32}).on(q).contiguous().shape(slots, tile_rows, width);
  FI_CHECK(slots >= 2 * ranges, ValueError, "workspace must have 2 slots or more for each of %lld ranges; got %s",
           static_cast<long long>(ranges), workspace.shape_str().c_str());
  const int64_t draft_row = (q_len + 31) / 32 * 4;
  if (draft_mask) {
    Dim bytes{"ceil(q_len / 32) * 4", draft_row};
    draft_mask.is({kU8}).on(q).contiguous().shape(rows, bytes);
  }

  if (rows == 0 || batch == 0 || qo_heads == 0) return;

  // 2 shape
  BatchDecodeParams params{};
  AttentionProblem& p = params.problem;
  const float* sink = factors(sinks, q, qo_heads);
  p.scale_q = factors(scale_q, q, qo_heads);
  p.scale_k = factors(scale_k, q, kv_heads);
  p.scale_v = factors(scale_v, q, kv_heads);
  p.q = q.data();
  p.k = k_cache.data();
  p.v = v_cache.data();
  p.out = out.data();
  p.lse = lse ? lse.data<float>() : nullptr;
  p.q_token = q.stride(0);
  p.q_head = q.stride(1);
  p.k_token = k_cache.stride(nhd ? 1 : 2);
  p.k_head = k_cache.stride(nhd ? 2 : 1);
  p.v_token = v_cache.stride(nhd ? 1 : 2);
  p.v_head = v_cache.stride(nhd ? 2 : 1);
  p.out_token = out.stride(0);
  p.out_head = out.stride(1);
  p.qo_heads = static_cast<int32_t>(qo_heads);
  p.kv_heads = static_cast<int32_t>(kv_heads);
  p.group = static_cast<int32_t>(qo_heads / kv_heads);
  p.dim_qk = static_cast<int32_t>(dim_qk);
  p.dim_vo = static_cast<int32_t>(dim_vo);
  p.out_type = out_type(out.dtype());
  p.out_scale = static_cast<float>(v_scale);
  p.mask.qo_len = static_cast<int32_t>(q_len);
  p.mask.causal = q_len > 1 && !draft_mask;
  p.mask.window_left = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(window_left, -1), 0x7fffffff));
  p.scores = {static_cast<float>(sm_scale), static_cast<float>(logits_soft_cap), pos_encoding == kAlibi};
  if (pos_encoding == kRopeOnTheFly) p.rotary = rotary(dim_qk, rope_scale, rope_theta);
  params.k_page = k_cache.stride(0);
  params.v_page = v_cache.stride(0);
  params.page_indices = page_indices.data<const int32_t>();
  params.schedule = schedule.data<int32_t>();
  params.workspace = workspace.data<float>();
  params.sinks = sink;
  params.bmm1_scale = scalar(bmm1_scale, q);
  params.bmm2_scale = scalar(bmm2_scale, q);
  params.draft_mask = draft_mask ? draft_mask.data<const uint8_t>() : nullptr;
  params.qo_indptr = qo_indptr ? qo_indptr.data<const int32_t>() : nullptr;
  params.index_bytes = page_indices.numel() * 4;
  params.query_bytes = ((rows - 1) * p.q_token + (qo_heads - 1) * p.q_head + dim_qk) * q.dtype().bytes();
  params.page_size = divisor(static_cast<uint32_t>(page_size));
  params.batch = static_cast<int32_t>(batch);
  params.blocks = static_cast<int32_t>(blocks);
  params.ranges = static_cast<int32_t>(ranges);
  params.group = p.by_group = divisor(static_cast<uint32_t>(p.group));
  params.row_tiles = divisor(static_cast<uint32_t>((q_len * p.group + kDecodeRows - 1) / kDecodeRows));
  params.draft_row = p.mask.draft_row = static_cast<int32_t>(draft_row);

  // 3 launch
  (void)impl;  // says which unit is bound
#if FI_CUDA
  const auto bytes = [](const Tensor& t) { return std::min<int64_t>(16, 8 * t.dtype().bytes()); };
  p.aligned = q.alignment(bytes(q), {p.q_token, p.q_head}) == bytes(q) &&
              k_cache.alignment(bytes(k_cache), {params.k_page, p.k_token, p.k_head}) == bytes(k_cache) &&
              v_cache.alignment(bytes(v_cache), {params.v_page, p.v_token, p.v_head}) == bytes(v_cache);
  const int64_t four = 4 * out.dtype().bytes();
  params.out_aligned = out.alignment(four, {p.out_token, p.out_head}) == four;
  launch_batch_decode(kernel, params, extras, k_cache, v_cache, split, kernel.pdl(enable_pdl));
#else
  (void)kernel, (void)split, (void)enable_pdl;
  CpuBatchDecode(params, variant_arguments(extras), q.dtype(), k_cache.dtype(), out.dtype()).run();
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::batch_decode, "out", "lse", "workspace", "schedule", "q", "k_cache", "v_cache", "page_indices", "sinks",
      "scale_q", "scale_k", "scale_v", "bmm1_scale", "bmm2_scale", "draft_mask", "qo_indptr", "kv_layout",
      "pos_encoding_mode", "q_len", "blocks", "ranges", "split", "window_left", "logits_soft_cap", "sm_scale",
      "v_scale", "rope_scale", "rope_theta", "enable_pdl", "impl")
