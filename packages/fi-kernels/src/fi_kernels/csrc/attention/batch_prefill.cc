// batch_prefill: attention of all query tokens of every request over its paged or ragged keys, tile by tile.
#include "fi/attention/prefill/batch_prefill.h"

#include "fi/attention/contract.h"
#include "fi/attention/extras.h"
#include "fi/generated/batch_prefill.h"
#include "fi/host/contents.h"

#if FI_CUDA
#include "fi/attention/prefill/launch.h"
#else
#include "fi/attention/prefill/cpu_batch.h"
#endif

namespace fi {
namespace {

// Raises unless the planned requests have their rows in q, their keys in the cache, and their masks in the mask. rows:
// of q; page_size: with a page table tokens of a page, else of all keys.
void check_tables(const Kernel& kernel, const BatchPrefillArgs& a, int64_t rows, int64_t page_size, int64_t pages) {
  const int64_t at = PrefillSchedule::words(0, 0);
  const auto values = [&](const OptionalTensor& t) {
    return Integers(kernel, t ? Tensor(t) : a.schedule, t ? t.numel() : 0);
  };
  const Integers words(kernel, a.schedule, at + 4 * a.batch_size), table = values(a.page_indices);
  const Integers masks = values(a.mask_indptr), prefixes = values(a.prefix_len);
  const auto window_left = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(a.window_left, -1), INT32_MAX));
  for (int64_t b = 0; b < a.batch_size; ++b) {
    const int64_t first = words[at + 4 * b], qo_len = words[at + 4 * b + 1];
    const int64_t begin = words[at + 4 * b + 2], kv_len = words[at + 4 * b + 3];
    FI_CHECK(first >= 0 && first + qo_len <= rows, ValueError,
             "q must have the rows %lld to %lld of request %lld; got %lld rows", static_cast<long long>(first),
             static_cast<long long>(first + qo_len), static_cast<long long>(b), static_cast<long long>(rows));
    if (qo_len == 0 || kv_len == 0) continue;
    const Mask range = Mask::of_range(0, window_left, static_cast<int32_t>(qo_len), static_cast<int32_t>(kv_len));
    if (a.page_indices)
      check_pages(table, begin + range.first_key(0) / page_size, begin + (kv_len + page_size - 1) / page_size, pages,
                  b);
    if (a.page_indices && a.v_table_offset)
      check_pages(table, a.v_table_offset + begin + range.first_key(0) / page_size,
                  a.v_table_offset + begin + (kv_len + page_size - 1) / page_size, pages, b);
    if (!a.page_indices)
      FI_CHECK(begin >= 0 && begin + kv_len <= page_size, ValueError,
               "k must have the tokens %lld to %lld of request %lld; got %lld tokens", static_cast<long long>(begin),
               static_cast<long long>(begin + kv_len), static_cast<long long>(b), static_cast<long long>(page_size));
    if (a.mask && a.mask_indptr)
      FI_CHECK(masks[b] >= 0 && masks[b] + (qo_len * kv_len + 7) / 8 <= a.mask.numel(), ValueError,
               "mask must have the bytes %lld to %lld of request %lld; got %lld bytes",
               static_cast<long long>(masks[b]), static_cast<long long>(masks[b] + (qo_len * kv_len + 7) / 8),
               static_cast<long long>(b), static_cast<long long>(a.mask.numel()));
    if (a.items)
      FI_CHECK(prefixes[b] >= 0 && kv_len - prefixes[b] <= a.items.size(1), ValueError,
               "items, the positions within items, must have %lld elements for request %lld, its kv_len less its "
               "prefix_len %lld; got %lld",
               static_cast<long long>(kv_len - prefixes[b]), static_cast<long long>(b),
               static_cast<long long>(prefixes[b]), static_cast<long long>(a.items.size(1)));
  }
}

BatchPrefillRequest request_of(const BatchPrefillArgs& a) {
  using Mask = BatchPrefillRequest::Mask;
  const KvCache cache(a.k, a.v);
  auto r = attention_request<BatchPrefillRequest>(a, cache.k, cache.v, static_cast<bool>(a.page_indices));
  r.mask = a.items ? Mask::kItems : a.mask ? Mask::kCustom : Mask::kPlain;
  r.alignment = alignment_of({a.q, cache.k, cache.v, a.out});
  return r;
}

void batch_prefill(const Kernel& kernel, const BatchPrefillArgs& a, const Extras& extras) {
  // 1 check
  extras.check_apart({&a.out, &a.lse, &a.schedule, &a.partials});
  const KvCache cache(a.k, a.v);
  const Tensor &k = cache.k, &v = cache.v;
  Dim rows{"qo_tokens"}, pages{"num_pages", 1}, page_size{"page_size"}, words{"words"};
  AttentionDims dims;
  auto& [qo_heads, kv_heads, head_dim_qk, head_dim_vo] = dims;
  const bool nhd = a.kv_layout == 0, paged = static_cast<bool>(a.page_indices);
  a.q.inner_contiguous().shape(rows, qo_heads, head_dim_qk);
  Dim &second = nhd ? page_size : kv_heads, &third = nhd ? kv_heads : page_size;
  Dim k_bytes{"head_dim_qk / 2", head_dim_qk / 2}, v_bytes{"head_dim_vo / 2"};
  const bool nvfp4 = is_nvfp4(k);
  Dim &k_width = nvfp4 ? k_bytes : head_dim_qk, &v_width = nvfp4 ? v_bytes : head_dim_vo;
  if (paged) {
    pages.value = -1;
    k.inner_contiguous().shape(pages, second, third, k_width);
    v.inner_contiguous().shape(pages, second, third, v_width);
    a.page_indices.is({kI32}).on(a.q).contiguous();
  } else {
    k.inner_contiguous().shape(second, third, k_width);
    v.inner_contiguous().shape(second, third, v_width);
  }
  if (nvfp4) head_dim_vo.value = 2 * v_bytes;
  FI_CHECK(a.num_qo_heads == 0 || qo_heads == a.num_qo_heads, ValueError, "q must have the planned %lld heads; got %s",
           static_cast<long long>(a.num_qo_heads), a.q.shape_str().c_str());
  FI_CHECK(paged || page_size >= a.kv_tokens, ValueError, "k must have the planned %lld tokens; got %s",
           static_cast<long long>(a.kv_tokens), k.shape_str().c_str());
  a.out.inner_contiguous().shape(rows, qo_heads, head_dim_vo);
  if (a.lse) a.lse.is({kF32}).on(a.q).contiguous().shape(rows, qo_heads);
  check_attention(a, k, v, dims, true);
  const KvScales scales = kv_scales(a.k_scales, a.v_scales, k, v, a.kv_layout);
  FI_CHECK(!paged || (page_size > 0 && page_size <= 0x7fffffff), ValueError, "k must have page_size > 0; got %s",
           k.shape_str().c_str());
  constexpr int64_t largest = 0x7fff0000;  // 32-bit counters have room for a tile beyond the end
  FI_CHECK(rows * qo_heads <= largest && (paged || page_size <= largest), ValueError,
           "too large: q has shape %s, k has shape %s", a.q.shape_str().c_str(), k.shape_str().c_str());
  FI_CHECK(a.tile_tokens > 0 && a.tile_tokens <= largest, ValueError, "tile_tokens must be positive; got %lld",
           static_cast<long long>(a.tile_tokens));
  a.schedule.is({kI32}).on(a.q).contiguous().shape(words);
  const int64_t least = PrefillSchedule::words(a.batch_size, rows / a.tile_tokens + a.batch_size);
  FI_CHECK(a.batch_size >= 0 && words >= least, ValueError, "schedule must have %lld words or more; got %lld",
           static_cast<long long>(least), static_cast<long long>(words));
  FI_CHECK(paged ? a.v_table_offset >= 0 && a.v_table_offset <= a.page_indices.numel() : a.v_table_offset == 0,
           ValueError, "v_table_offset must be 0, or an entry of page_indices; got %lld",
           static_cast<long long>(a.v_table_offset));
  FI_CHECK(a.num_ctas >= 0, ValueError, "num_ctas must not be negative; got %lld", static_cast<long long>(a.num_ctas));
  if (a.partials) {
    a.partials.is({kU8}).on(a.q).contiguous();
    FI_CHECK(reinterpret_cast<uintptr_t>(a.partials.data()) % 16 == 0, ValueError,
             "partials must begin at a multiple of 16 bytes");
  }
  Dim batch{"batch_size", a.batch_size}, bounds{"batch_size + 1", a.batch_size + 1}, bytes{"bytes"}, items_row{"items"};
  if (a.mask) a.mask.is({kU8}).on(a.q).contiguous();
  if (a.mask && a.mask_indptr) {
    a.mask.shape(bytes);
    a.mask_indptr.is({kI32}).on(a.q).contiguous().shape(bounds);
  } else if (a.mask) {
    a.mask.shape(rows, bytes);
  }
  if (a.items) {
    FI_CHECK(a.prefix_len, ValueError, "prefix_len must be given with items");
    a.prefix_len.is({kI32, kU32}).on(a.q).contiguous().shape(batch);
    a.items.is({kU16}).on(a.q).contiguous().shape(batch, items_row);
  }

  if (rows > 0 && qo_heads > 0 && kernel.checks_contents(a.q.device()))
    check_tables(kernel, a, rows, page_size, paged ? k.size(0) : 1);

  // 2 shape
  BatchPrefillParams params{};
  AttentionProblem& p = params.problem;
  params.scales = {factors(a.sinks, a.q, qo_heads), scalar(a.bmm1_scale, a.q), scalar(a.bmm2_scale, a.q)};
  fill_attention(p, a, k, v, dims);
  p.kv_scales = scales;
  p.mask.causal = a.items || (a.causal && !a.mask);
  params.pages.page_size = divisor(static_cast<uint32_t>(paged ? page_size.value : 1));
  if (paged)
    params.pages = {
        a.page_indices.data<const int32_t>(),  params.pages.page_size, k.stride(0), v.stride(0), last_page(k),
        static_cast<int32_t>(a.v_table_offset)};
  params.schedule = PrefillSchedule::at(a.schedule.data<int32_t>(), a.batch_size);
  params.partials = a.partials ? static_cast<float*>(a.partials.data()) : nullptr;
  if (a.items) {
    params.masks.prefix_len = a.prefix_len.data<const int32_t>();
    params.masks.items = a.items.data<const uint16_t>();
    params.masks.items_row = static_cast<int32_t>(items_row);
  } else if (a.mask) {
    params.masks.mask = a.mask.data<const uint8_t>();
    params.masks.offsets = a.mask_indptr ? a.mask_indptr.data<const int32_t>() : nullptr;
    params.masks.draft_row = a.mask_indptr ? 0 : static_cast<int32_t>(bytes);
  }
  params.tile_tokens = static_cast<int32_t>(a.tile_tokens);
  params.padded_rows = a.zero_padded_rows ? static_cast<int32_t>(rows) : 0;
  params.batch_size = static_cast<int32_t>(a.batch_size);
  if (rows == 0 || qo_heads == 0) return;

  // 3 launch
#if FI_CUDA
  p.aligned = rows_aligned(p, a.q, k, v, params.pages.k_page, params.pages.v_page) &&
              (!nvfp4 || scales_aligned(a.k_scales, a.v_scales));
  const int64_t kv_tokens = a.kv_tokens > 0 ? a.kv_tokens
                            : paged         ? a.page_indices.numel() * page_size
                                            : page_size.value;
  launch_batch_prefill(kernel, params, extras, a.q, k, request_of(a).alignment, page_size, kv_tokens, a.num_ctas,
                       kernel.pdl(a.enable_pdl));
#else
  (void)kernel;
  CpuBatchPrefill(params, variant_arguments(extras), a.q.dtype(), k.dtype(), a.out.dtype(), batch_invariant()).run();
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::batch_prefill, fi::request_of)
