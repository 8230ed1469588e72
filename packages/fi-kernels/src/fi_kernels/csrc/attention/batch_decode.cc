// batch_decode: attention of a few query rows of every request over its paged keys, as a schedule divides it.
#include "fi/attention/decode/batch_decode.h"

#include "fi/attention/contract.h"
#include "fi/attention/extras.h"
#include "fi/generated/batch_decode.h"
#include "fi/host/contents.h"

#if FI_CUDA
#include "fi/attention/decode/launch.h"
#else
#include "fi/attention/decode/cpu_batch.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
constexpr bool kTakesHeads = true;  // several kv heads in a q tile
#else
constexpr bool kTakesHeads = false;
#endif

// Raises unless the planned requests have their rows in q, and their pages in the table and in the cache.
void check_tables(const Kernel& kernel, const BatchDecodeArgs& a, int64_t batch, int64_t page_size, int64_t pages) {
  if (a.qo_indptr) {
    const Integers starts(kernel, a.qo_indptr);
    check_offsets(starts, a.q.size(0));
    for (int64_t b = 0; b < batch; ++b)
      FI_CHECK(starts[b + 1] - starts[b] <= a.q_len, ValueError,
               "%s must give each request at most %lld rows, the maximum of the call; got %lld of request %lld",
               starts.name(), static_cast<long long>(a.q_len), static_cast<long long>(starts[b + 1] - starts[b]),
               static_cast<long long>(b));
  }
  const int64_t at = decode_requests_offset(a.num_ranges);
  const Integers words(kernel, a.schedule, at + 4 * batch), table(kernel, a.page_indices);
  const DecodeQueries queries{static_cast<int32_t>(a.q_len),
                              static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(a.window_left, -1), INT32_MAX))};
  for (int64_t b = 0; b < batch; ++b) {
    const auto kv_len = static_cast<int32_t>(words[at + 4 * b]);
    const int64_t first = words[at + 4 * b + 1];
    const int64_t seen = decode_kv_tiles(kv_len, queries).begin;
    const int64_t begin = first + seen * kDecodeKvTile / page_size, end = first + (kv_len + page_size - 1) / page_size;
    if (kv_len > 0) check_pages(table, begin, end, pages, b);
    if (kv_len > 0 && a.v_table_offset) check_pages(table, a.v_table_offset + begin, a.v_table_offset + end, pages, b);
  }
}

BatchDecodeRequest request_of(const BatchDecodeArgs& a) {
  using Mask = BatchDecodeRequest::Mask;
  const KvCache cache(a.k, a.v);
  auto r = attention_request<BatchDecodeRequest>(a, cache.k, cache.v, true);
  r.mask = a.mask ? Mask::kCustom : Mask::kPlain;
  r.alignment = r.kv == kE2M1 && a.k_scales && a.v_scales
                    ? alignment_of({a.q, cache.k, cache.v}, {a.k_scales, a.v_scales})
                    : alignment_of({a.q, cache.k, cache.v});
  r.heads_per_tile = a.heads_per_tile;
  return r;
}

void batch_decode(const Kernel& kernel, const BatchDecodeArgs& a, const Extras& extras) {
  // 1 check
  extras.check_apart({&a.out, &a.lse, &a.partials, &a.schedule});
  const KvCache cache(a.k, a.v);
  const Tensor &k = cache.k, &v = cache.v;
  Dim rows{"tokens"}, pages{"num_pages"}, page_size{"page_size"}, words{"words"};
  AttentionDims dims;
  auto& [qo_heads, kv_heads, head_dim_qk, head_dim_vo] = dims;
  const bool nhd = a.kv_layout == 0, nvfp4 = is_nvfp4(k);
  a.q.inner_contiguous().shape(rows, qo_heads, head_dim_qk);
  Dim &second = nhd ? page_size : kv_heads, &third = nhd ? kv_heads : page_size;
  Dim k_bytes{"head_dim_qk / 2", head_dim_qk / 2}, v_bytes{"head_dim_vo / 2"};
  k.inner_contiguous().shape(pages, second, third, nvfp4 ? k_bytes : head_dim_qk);
  v.inner_contiguous().shape(pages, second, third, nvfp4 ? v_bytes : head_dim_vo);
  if (nvfp4) head_dim_vo.value = 2 * v_bytes;
  a.out.inner_contiguous().shape(rows, qo_heads, head_dim_vo);
  if (a.lse) a.lse.is({kF32}).on(a.q).contiguous().shape(rows, qo_heads);
  check_attention(a, k, v, dims, true);
  const KvScales scales = kv_scales(a.k_scales, a.v_scales, k, v, a.kv_layout);
  FI_CHECK(page_size > 0 && page_size <= 0x7fffffff, ValueError, "k must have page_size > 0; got %s",
           k.shape_str().c_str());
  FI_CHECK(a.q_len > 0 && (a.qo_indptr || rows % a.q_len == 0), ValueError,
           "q must have a multiple of q_len = %lld rows; got %s", static_cast<long long>(a.q_len),
           a.q.shape_str().c_str());
  FI_CHECK(a.rows == 0 || (rows == a.rows && qo_heads == a.num_qo_heads), ValueError,
           "q must have the planned %lld rows of %lld heads; got %s", static_cast<long long>(a.rows),
           static_cast<long long>(a.num_qo_heads), a.q.shape_str().c_str());
  FI_CHECK(rows * qo_heads <= 0x7fff0000, ValueError, "q is too large: %s", a.q.shape_str().c_str());
  Dim starts{"batch_size + 1"};
  if (a.qo_indptr) a.qo_indptr.is({kI32}).on(a.q).contiguous().shape(starts);
  const int64_t batch = a.qo_indptr ? std::max<int64_t>(starts - 1, 0) : rows / a.q_len;
  a.page_indices.is({kI32}).on(a.q).contiguous();
  FI_CHECK(a.v_table_offset >= 0 && a.v_table_offset <= a.page_indices.numel(), ValueError,
           "v_table_offset must be 0, or an entry of page_indices; got %lld", static_cast<long long>(a.v_table_offset));
  a.schedule.is({kI32}).on(a.q).contiguous().shape(words);
  const int64_t least = decode_counters_offset(a.num_ranges, batch) + 2 * a.num_ranges;
  FI_CHECK(a.num_ctas > 0 && a.num_ctas <= a.num_ranges && a.num_ranges <= kDecodeMaxRanges && words >= least,
           ValueError, "schedule must have %lld words or more for %lld CTAs and %lld work ranges; got %lld",
           static_cast<long long>(least), static_cast<long long>(a.num_ctas), static_cast<long long>(a.num_ranges),
           static_cast<long long>(words));
  Dim partials{"partials"}, tile_rows{"16", kDecodeQTile}, width{"head_dim_vo + 2", head_dim_vo + 2};
  a.partials.is({kF32}).on(a.q).contiguous().shape(partials, tile_rows, width);
  FI_CHECK(partials >= 2 * a.num_ranges, ValueError,
           "partials must have 2 partials or more for each of %lld work ranges; got %s",
           static_cast<long long>(a.num_ranges), a.partials.shape_str().c_str());
  const int64_t tile_heads = kv_heads > 0 ? qo_heads / kv_heads * a.heads_per_tile : 0;  // query heads
  FI_CHECK(a.heads_per_tile == 1 || (kTakesHeads && nvfp4 && a.q_len == 1 && !a.qo_indptr && a.heads_per_tile > 0 &&
                                     kv_heads % a.heads_per_tile == 0 && tile_heads <= kDecodeQTile),
           ValueError,
           "heads_per_tile must be 1, or with NVFP4 keys on CUDA and q_len 1 a divisor of %lld kv heads with at most "
           "%d query heads; got %lld",
           static_cast<long long>(kv_heads), kDecodeQTile, static_cast<long long>(a.heads_per_tile));
  const int64_t draft_row = (a.q_len + 31) / 32 * 4;
  if (a.mask) {
    Dim bytes{"ceil(q_len / 32) * 4", draft_row};
    a.mask.is({kU8}).on(a.q).contiguous().shape(rows, bytes);
  }

  if (rows == 0 || batch == 0 || qo_heads == 0) return;
  if (kernel.checks_contents(a.q.device())) check_tables(kernel, a, batch, page_size, pages);

  // 2 shape
  BatchDecodeParams params{};
  AttentionProblem& p = params.problem;
  fill_attention(p, a, k, v, dims);
  p.kv_scales = scales;
  p.mask.qo_len = static_cast<int32_t>(a.q_len);
  p.mask.causal = a.q_len > 1 && !a.mask;
  params.pages = {a.page_indices.data<const int32_t>(),
                  divisor(static_cast<uint32_t>(page_size)),
                  k.stride(0),
                  v.stride(0),
                  last_page(k),
                  static_cast<int32_t>(a.v_table_offset)};
  params.scales = {factors(a.sinks, a.q, qo_heads), scalar(a.bmm1_scale, a.q), scalar(a.bmm2_scale, a.q)};
  params.masks.mask = a.mask ? a.mask.data<const uint8_t>() : nullptr;
  params.masks.draft_row = p.mask.draft_row = static_cast<int32_t>(draft_row);
  params.schedule = {a.schedule.data<int32_t>(), static_cast<int32_t>(a.num_ranges), static_cast<int32_t>(batch)};
  params.partials = a.partials.data<float>();
  params.qo_indptr = a.qo_indptr ? a.qo_indptr.data<const int32_t>() : nullptr;
  params.tile_group_size = a.heads_per_tile == 1 ? p.group_size : divisor(static_cast<uint32_t>(tile_heads));
  params.q_tiles_per_head = divisor(static_cast<uint32_t>((a.q_len * tile_heads + kDecodeQTile - 1) / kDecodeQTile));
  params.num_ctas = static_cast<int32_t>(a.num_ctas);
  params.heads_per_tile = static_cast<int32_t>(a.heads_per_tile);
  params.copies.index_bytes = a.page_indices.numel() * 4;
  params.copies.query_bytes = ((rows - 1) * p.q_token + (qo_heads - 1) * p.q_head + head_dim_qk) * a.q.dtype().bytes();

  // 3 launch
#if FI_CUDA
  p.aligned = rows_aligned(p, a.q, k, v, params.pages.k_page, params.pages.v_page) &&
              (!nvfp4 || scales_aligned(a.k_scales, a.v_scales));
  const int64_t four = 4 * a.out.dtype().bytes();
  params.out_aligned = a.out.alignment(four, {p.out_token, p.out_head}) == four;
  launch_batch_decode(kernel, params, extras, k, v, request_of(a).alignment, a.split_kv, kernel.pdl(a.enable_pdl));
#else
  (void)kernel, (void)a.split_kv, (void)a.enable_pdl;
  CpuBatchDecode(params, variant_arguments(extras), a.q.dtype(), k.dtype(), a.out.dtype()).run();
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::batch_decode, fi::request_of)
