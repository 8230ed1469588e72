// batch_prefill: attention of all query tokens of every request over its paged or ragged keys, tile by tile.
#include "fi/attention/prefill/batch_prefill.h"

#include "fi/attention/contract.h"
#include "fi/attention/prefill/prefill_problem.h"
#include "fi/generated/batch_prefill.h"

#if FI_CUDA
#include "fi/attention/prefill/launch.h"
#else
#include "fi/attention/prefill/cpu_batch.h"
#endif

namespace fi {
namespace {

void batch_prefill(const Kernel& kernel, const BatchPrefillArgs& a, const Extras& extras) {
  // 1 check
  Dim rows{"qo_tokens"}, pages{"num_pages", 1}, page_size{"page_size"}, words{"words"};
  AttentionDims dims;
  auto& [qo_heads, kv_heads, head_dim_qk, head_dim_vo] = dims;
  const bool nhd = a.kv_layout == 0, paged = static_cast<bool>(a.page_indices);
  a.q.inner_contiguous().shape(rows, qo_heads, head_dim_qk);
  Dim &second = nhd ? page_size : kv_heads, &third = nhd ? kv_heads : page_size;
  if (paged) {
    pages.value = -1;
    a.k.inner_contiguous().shape(pages, second, third, head_dim_qk);
    a.v.inner_contiguous().shape(pages, second, third, head_dim_vo);
    a.page_indices.is({kI32}).on(a.q).contiguous();
  } else {
    a.k.inner_contiguous().shape(second, third, head_dim_qk);
    a.v.inner_contiguous().shape(second, third, head_dim_vo);
  }
  a.out.inner_contiguous().shape(rows, qo_heads, head_dim_vo);
  if (a.lse) a.lse.is({kF32}).on(a.q).contiguous().shape(rows, qo_heads);
  check_attention(a, a.k, a.v, dims);
  FI_CHECK(!paged || (page_size > 0 && page_size <= 0x7fffffff), ValueError, "k must have page_size > 0; got %s",
           a.k.shape_str().c_str());
  constexpr int64_t largest = 0x7fff0000;  // 32-bit counters have room for a tile beyond the end
  FI_CHECK(rows * qo_heads <= largest && (paged || page_size <= largest), ValueError,
           "too large: q has shape %s, k has shape %s", a.q.shape_str().c_str(), a.k.shape_str().c_str());
  FI_CHECK(a.q_tile_tokens > 0 && a.q_tile_tokens <= largest, ValueError, "q_tile_tokens must be positive; got %lld",
           static_cast<long long>(a.q_tile_tokens));
  a.schedule.is({kI32}).on(a.q).contiguous().shape(words);
  const int64_t least = PrefillSchedule::words(a.batch_size, rows / a.q_tile_tokens + a.batch_size);
  FI_CHECK(a.batch_size >= 0 && words >= least, ValueError, "schedule must have %lld words or more; got %lld",
           static_cast<long long>(least), static_cast<long long>(words));
  if (a.workspace) {
    a.workspace.is({kU8}).on(a.q).contiguous();
    FI_CHECK(reinterpret_cast<uintptr_t>(a.workspace.data()) % 16 == 0, ValueError,
             "workspace must begin at a multiple of 16 bytes");
  }
  Dim batch{"batch_size", a.batch_size}, bounds{"batch_size + 1", a.batch_size + 1}, bytes{"bytes"}, items_row{"items"};
  if (a.custom_mask) a.custom_mask.is({kU8}).on(a.q).contiguous();
  if (a.custom_mask && a.mask_indptr) {
    a.custom_mask.shape(bytes);
    a.mask_indptr.is({kI32}).on(a.q).contiguous().shape(bounds);
  } else if (a.custom_mask) {
    a.custom_mask.shape(rows, bytes);
  }
  if (a.items) {
    FI_CHECK(a.prefix_len, ValueError, "prefix_len must be given with items");
    a.prefix_len.is({kI32, kU32}).on(a.q).contiguous().shape(batch);
    a.items.is({kU16}).on(a.q).contiguous().shape(batch, items_row);
  }

  // 2 shape
  PrefillProblem params{};
  AttentionProblem& p = params.problem;
  params.sinks = factors(a.sinks, a.q, qo_heads);
  fill_attention(p, a, a.k, a.v, dims);
  p.mask.causal = a.items || (a.causal && !a.custom_mask);
  params.k_page = paged ? a.k.stride(0) : 0;
  params.v_page = paged ? a.v.stride(0) : 0;
  params.page_indices = paged ? a.page_indices.data<const int32_t>() : nullptr;
  params.schedule = PrefillSchedule::at(a.schedule.data<int32_t>(), a.batch_size);
  params.partials = a.workspace ? static_cast<float*>(a.workspace.data()) : nullptr;
  if (a.items) {
    params.prefix_len = a.prefix_len.data<const int32_t>();
    params.items = a.items.data<const uint16_t>();
    params.items_row = static_cast<int32_t>(items_row);
  } else if (a.custom_mask) {
    params.custom_mask = a.custom_mask.data<const uint8_t>();
    params.mask_indptr = a.mask_indptr ? a.mask_indptr.data<const int32_t>() : nullptr;
    params.draft_row = a.mask_indptr ? 0 : static_cast<int32_t>(bytes);
  }
  params.bmm1_scale = scalar(a.bmm1_scale, a.q);
  params.bmm2_scale = scalar(a.bmm2_scale, a.q);
  params.page_size = divisor(static_cast<uint32_t>(paged ? page_size.value : 1));
  params.tile_tokens = static_cast<int32_t>(a.q_tile_tokens);
  params.padded_rows = a.zero_padded_rows ? static_cast<int32_t>(rows) : 0;
  params.batch = static_cast<int32_t>(a.batch_size);
  if (rows == 0 || qo_heads == 0) return;

  // 3 launch
#if FI_CUDA
  p.aligned = rows_aligned(p, a.q, a.k, a.v, params.k_page, params.v_page);
  const int64_t kv_tokens = a.kv_tokens > 0 ? a.kv_tokens
                            : paged         ? a.page_indices.numel() * page_size
                                            : page_size.value;
  launch_batch_prefill(kernel, params, extras, a.q, a.k, page_size, kv_tokens, a.batch_size, kernel.pdl(a.enable_pdl));
#else
  (void)kernel;
  CpuBatchPrefill(params, variant_arguments(extras), a.q.dtype(), a.k.dtype(), a.out.dtype()).run();
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::batch_prefill)
