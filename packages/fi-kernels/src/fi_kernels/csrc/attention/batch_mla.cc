// batch_mla: multi-head latent attention of every request over its paged latent cache, as a schedule divides it.
#include "fi/attention/mla/batch_mla.h"

#include <algorithm>
#include <cmath>

#include "fi/generated/batch_mla.h"
#include "fi/host/contents.h"
#include "fi/host/op.h"

#if FI_CUDA
#include "fi/attention/mla/launch.h"
#else
#include "fi/attention/mla/cpu_batch_mla.h"
#endif

namespace fi {
namespace {

// Raises unless the planned requests have their rows in q, and their pages in the table and in the cache.
void check_tables(const Kernel& kernel, const BatchMlaArgs& a, const BatchMlaParams& p) {
  const int64_t first = mla_requests_offset(p.max_ranges), page_size = p.page_size.value;
  const Integers words(kernel, a.schedule, mla_schedule_words(p.max_ranges, p.batch)), table(kernel, a.page_indices);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t at = first + 8 * b, kv_len = words[at], page = words[at + 1], begin = words[at + 2],
                  rows = words[at + 3];
    FI_CHECK(rows == 0 || (begin >= 0 && begin + rows <= p.tokens), ValueError,
             "qo_indptr, as planned, must stay within the %d rows of q_nope; request %lld has rows %lld to %lld",
             p.tokens, static_cast<long long>(b), static_cast<long long>(begin), static_cast<long long>(begin + rows));
    if (rows == 0) continue;
    if (!p.sparse) {
      check_pages(table, page, page + (kv_len + page_size - 1) / page_size, a.ckv_cache.size(0), b);
      continue;
    }
    FI_CHECK(page >= 0 && page + kv_len <= table.size(), ValueError,
             "%s must have entries %lld to %lld for query token %lld; got %lld", table.name(),
             static_cast<long long>(page), static_cast<long long>(page + kv_len), static_cast<long long>(b),
             static_cast<long long>(table.size()));
    const int64_t slots = a.any_index ? 0 : a.ckv_cache.size(0) * (p.is_packed ? a.ckv_cache.size(1) : 1);
    for (int64_t i = page; i < page + kv_len && !a.any_index; ++i)
      FI_CHECK(table[i] >= -1 && table[i] < slots, ValueError,
               "%s must name slots of the cache, 0 to %lld, or be -1; got %lld at %lld", table.name(),
               static_cast<long long>(slots - 1), static_cast<long long>(table[i]), static_cast<long long>(i));
  }
}

BatchMlaRequest request_of(const BatchMlaArgs& a) {
  constexpr int64_t kNarrowRows = 16;  // packed query rows of a CTA for few rows, on average of the requests
  const int64_t rows = a.q_nope.size_or_0(0) * a.q_nope.size_or_0(1);
  // Batch invariant: one kernel, whatever other requests have.
  const bool narrow = a.fixed_splits ? a.fine_splits : rows <= kNarrowRows * a.batch_size && !batch_invariant();
  using Rows = BatchMlaRequest::Rows;
  return {a.q_nope.dtype(), a.ckv_cache.dtype(), narrow ? Rows::kNarrow : Rows::kWide, a.q_pe.size_or_0(-1) > 0,
          a.sparse,         a.fixed_splits};
}

// Checks a cache of packed pages, [pages, page_size, 584] bytes, and describes it.
void describe_packed(const BatchMlaArgs& a, BatchMlaParams& p) {
  constexpr int64_t kRow = kMlaPackedRow + kMlaPackedScales;
  const int64_t page_size = a.ckv_cache.size(1), slots = a.ckv_cache.size(0) * page_size;
  FI_CHECK(a.sparse && a.q_nope.dtype() == kBF16 && !p.has_rope && !a.ckv_scales && a.ckv_scale == 1, TypeError,
           "ckv_cache of packed pages must come with sparse indices, bf16 queries of width 512 and no other scales");
  FI_CHECK(a.ckv_cache.stride(1) == kRow && a.ckv_cache.stride(0) % 16 == 0 && slots <= 0x7fffffff, ValueError,
           "ckv_cache must have tokens %lld bytes apart, pages at multiples of 16 bytes and less than 2^31 tokens; got "
           "shape %s, strides %lld and %lld",
           static_cast<long long>(kRow), a.ckv_cache.shape_str().c_str(), static_cast<long long>(a.ckv_cache.stride(0)),
           static_cast<long long>(a.ckv_cache.stride(1)));
  FI_CHECK(reinterpret_cast<uintptr_t>(a.ckv_cache.data()) % 16 == 0, ValueError,
           "ckv_cache must begin at a multiple of 16 bytes");
  p.is_packed = 1;
  p.packed_page = divisor(static_cast<uint32_t>(page_size));
  p.page_size = divisor(1);
  p.last_page = static_cast<uint32_t>(slots > 0 ? slots - 1 : 0);
}

void batch_mla(const Kernel& kernel, const BatchMlaArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, heads{"num_heads"}, latent{"512", kMlaLatent}, rope{"64", kMlaRope}, pages{"num_pages"},
      page_size{"page_size"}, kinds{"2", kMlaSchedules}, words{"words"},
      packed{"584", kMlaPackedRow + kMlaPackedScales};
  const bool is_packed = a.ckv_cache.dtype() == kU8;
  a.q_nope.is({kF16, kBF16}).inner_contiguous().shape(tokens, heads, latent);
  const bool has_rope = a.q_pe.size(-1) > 0 || a.kpe_cache.size(-1) > 0;
  if (has_rope) a.q_pe.like(a.q_nope).inner_contiguous().shape(tokens, heads, rope);
  a.ckv_cache.is({kF16, kBF16, kE4M3, kU8}).on(a.q_nope).inner_contiguous();
  a.ckv_cache.shape(pages, page_size, is_packed ? packed : latent);
  const bool fp8 = a.ckv_cache.dtype() == kE4M3, wide_rope = fp8 && has_rope && a.kpe_cache.dtype() == a.q_nope.dtype();
  if (has_rope) a.kpe_cache.like(wide_rope ? a.q_nope : a.ckv_cache).inner_contiguous().shape(pages, page_size, rope);
  FI_CHECK(!wide_rope || a.kpe_scale == a.ckv_scale, ValueError,
           "kpe_scale must be ckv_scale, %g, with kpe_cache of q_nope's type; got %g", a.ckv_scale, a.kpe_scale);
  if (!fp8 && !is_packed) a.ckv_cache.like(a.q_nope);
  a.out.like(a.q_nope).inner_contiguous().shape(tokens, heads, latent);
  if (a.lse) a.lse.is({kF32}).on(a.q_nope).contiguous().shape(tokens, heads);
  if (a.score_stats) a.score_stats.is({kF32}).on(a.q_nope).contiguous().shape(kinds, tokens, heads);
  a.page_indices.is({kI32}).on(a.q_nope).contiguous();
  a.schedule.is({kI32}).on(a.q_nope).contiguous().shape(kinds, words);
  a.workspace.is({kF32}).on(a.q_nope).contiguous();
  if (a.ckv_scales) {
    Dim groups{"4", kMlaLatent / kMlaScaleGroup};
    a.ckv_scales.is({kF32}).on(a.q_nope).inner_contiguous().shape(pages, page_size, groups);
    FI_CHECK(fp8, ValueError, "ckv_scales must come with a float8_e4m3fn cache; got %s",
             a.ckv_cache.dtype().str().c_str());
  }
  Dim one{"1", 1};
  if (a.sinks) a.sinks.is({kF32}).on(a.q_nope).contiguous().shape(heads);
  if (a.score_scale) a.score_scale.is({kF32}).on(a.q_nope).contiguous().shape(one);
  if (a.out_scale) a.out_scale.is({kF32}).on(a.q_nope).contiguous().shape(one);
  FI_CHECK(a.cp_world > 0 && a.cp_world <= 65536 && a.cp_rank >= 0 && a.cp_rank < a.cp_world, ValueError,
           "cp_rank must be in 0..cp_world - 1; got %lld of %lld", static_cast<long long>(a.cp_rank),
           static_cast<long long>(a.cp_world));
  FI_CHECK(page_size > 0 && page_size <= 0x7fffffff, ValueError, "ckv_cache must have page_size > 0; got %s",
           a.ckv_cache.shape_str().c_str());
  FI_CHECK(!a.sparse || is_packed || page_size == 1, ValueError,
           "ckv_cache must have page_size 1 for sparse indices; got %lld", static_cast<long long>(page_size));
  FI_CHECK((a.num_heads == 0 || heads == a.num_heads) && (a.page_size == 0 || page_size == a.page_size), ValueError,
           "q_nope and ckv_cache must have the planned %lld heads and pages of %lld tokens; got %s and %s",
           static_cast<long long>(a.num_heads), static_cast<long long>(a.page_size), a.q_nope.shape_str().c_str(),
           a.ckv_cache.shape_str().c_str());
  FI_CHECK(heads > 0 && heads <= 65536 && tokens * heads <= 0x7fff0000, ValueError, "q_nope is too large: %s",
           a.q_nope.shape_str().c_str());
  FI_CHECK(a.max_ranges > 0 && a.max_ranges <= kMlaMaxRanges && a.batch_size >= 0 &&
               words >= mla_schedule_words(a.max_ranges, a.batch_size),
           ValueError, "schedule must have rows of %lld words or more; got %lld",
           static_cast<long long>(mla_schedule_words(a.max_ranges, a.batch_size)), static_cast<long long>(words));
  FI_CHECK(a.narrow_ranges > 0 && a.wide_ranges > 0 && std::max(a.narrow_ranges, a.wide_ranges) <= a.max_ranges &&
               a.cluster > 0 && a.wide_ranges * a.cluster <= a.max_ranges,
           ValueError, "narrow_ranges and wide_ranges * cluster must be in 1..max_ranges; got %lld, %lld * %lld, %lld",
           static_cast<long long>(a.narrow_ranges), static_cast<long long>(a.wide_ranges),
           static_cast<long long>(a.cluster), static_cast<long long>(a.max_ranges));
  if (tokens == 0 || a.batch_size == 0) return;

  // 2 shape
  BatchMlaParams p{};
  p.q_nope = a.q_nope.data();
  p.q_pe = a.q_pe.data();
  p.ckv = a.ckv_cache.data();
  p.kpe = a.kpe_cache.data();
  p.out = a.out.data();
  p.lse = a.lse ? a.lse.data<float>() : nullptr;
  p.score_stats = a.score_stats ? a.score_stats.data<float>() : nullptr;
  p.keep_max = a.exact_max ? 0.f : kMlaKeepMax;
  p.q_nope_token = a.q_nope.stride(0), p.q_nope_head = a.q_nope.stride(1);
  p.ckv_page = a.ckv_cache.stride(0), p.ckv_token = a.ckv_cache.stride(1);
  p.out_token = a.out.stride(0), p.out_head = a.out.stride(1);
  if (has_rope) {
    p.q_pe_token = a.q_pe.stride(0), p.q_pe_head = a.q_pe.stride(1);
    p.kpe_page = a.kpe_cache.stride(0), p.kpe_token = a.kpe_cache.stride(1);
  }
  if (a.ckv_scales) {
    p.ckv_scales = a.ckv_scales.data<const float>();
    p.scales_page = a.ckv_scales.stride(0), p.scales_token = a.ckv_scales.stride(1);
  }
  p.sinks = a.sinks ? a.sinks.data<const float>() : nullptr;
  p.score_scales = a.score_scale ? a.score_scale.data<const float>() : nullptr;
  p.out_scales = a.out_scale ? a.out_scale.data<const float>() : nullptr;
  p.page_indices = a.page_indices.data<const int32_t>();
  p.last_page = last_page(a.ckv_cache);
  p.schedule = a.schedule.data<int32_t>();
  p.workspace = a.workspace.data<float>();
  p.score_scale = static_cast<float>(a.sm_scale * a.ckv_scale) * kLog2e;
  p.rope_factor = static_cast<float>(a.kpe_scale / a.ckv_scale);
  p.out_scale = static_cast<float>(a.ckv_scale);
  p.lse_factor = a.lse_base_e ? 1.f / kLog2e : 1.f;
  p.page_size = divisor(static_cast<uint32_t>(page_size));
  p.heads = divisor(static_cast<uint32_t>(heads));
  p.ranks = divisor(static_cast<uint32_t>(a.cp_world));
  p.rank = static_cast<int32_t>(a.cp_rank);
  p.batch = static_cast<int32_t>(a.batch_size);
  p.max_ranges = static_cast<int32_t>(a.max_ranges);
  p.tokens = static_cast<int32_t>(tokens);
  p.cluster = 1;
  p.causal = a.causal, p.has_rope = has_rope, p.sparse = a.sparse;
  p.wide_rope = wide_rope;
  if (is_packed) describe_packed(a, p);
  if (kernel.checks_contents(a.q_nope.device())) check_tables(kernel, a, p);

  // 3 launch
#if FI_CUDA
  launch_batch_mla(kernel, p, a, words, kernel.pdl(a.enable_pdl));
#else
  (void)kernel, (void)a.enable_pdl;
  CpuBatchMla(p, a.q_nope.dtype(), a.ckv_cache.dtype(), a.fixed_splits).run();
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::batch_mla, fi::request_of)
