// prefill_plan: writes the q tiles of a batch in the order in which persistent CTAs take them.
#include "fi/attention/prefill/prefill_plan.h"

#include <algorithm>
#include <cstdint>

#include "fi/attention/lengths.h"
#include "fi/generated/prefill_plan.h"

namespace fi {
namespace {

#if !FI_CUDA
PrefillTileStats tiles_of(const PrefillPlanParams& p, int32_t tokens) {
  PrefillTileStats tiles{0, 0, 0};
  for (int32_t b = 0; b < p.batch; ++b) {
    const PrefillRequest r = p.request(b);
    for (int32_t t = 0; t < p.tiles(r, tokens); ++t) {
      const int32_t work = p.kv_tiles(r, t, tokens);
      tiles.work += work;
      ++tiles.num_tiles;
      tiles.longest = std::max(tiles.longest, work);
    }
  }
  return tiles;
}

// As on the device.
void run_cpu(const PrefillPlanParams& p) {
  const PrefillSchedule& s = p.schedule;
  const auto best_cost = [](const PrefillSplit& split) {
    uint32_t best = PrefillSplit::kNever;
    for (int32_t splits = 1; splits <= kMaxSplits; ++splits) best = std::min(best, split.cost(splits));
    return best;
  };
  PrefillTileStats tiles = tiles_of(p, p.tile_tokens);
  int32_t tokens = p.tile_tokens, q_tiles = 0;
  if (p.short_tile_tokens > 0 && int64_t{tiles.num_tiles} * p.kv_heads <= int64_t{4} * p.num_ctas) {
    const PrefillTileStats low = tiles_of(p, p.short_tile_tokens);
    if (low.num_tiles <= p.max_tiles && prefers_short(tiles, low, p.kv_heads, p.num_ctas, p.max_partials, best_cost)) {
      tiles = low;
      tokens = p.short_tile_tokens;
    }
  }
  for (int32_t b = 0; b < p.batch; ++b) {
    s.requests[b] = p.request(b);
    for (int32_t t = 0; t < p.tiles(s.requests[b], tokens) && q_tiles < p.max_tiles; ++t) s.tiles[q_tiles++] = {b, t};
  }
  const auto work = [&](const PrefillWorkTile& x) { return p.kv_tiles(s.requests[x.request], x.q_tile, tokens); };
  std::stable_sort(s.tiles, s.tiles + q_tiles,
                   [&](const PrefillWorkTile& x, const PrefillWorkTile& y) { return work(x) > work(y); });
  PrefillSplit split = PrefillSplit::of(tiles, p.kv_heads, p.num_ctas, p.max_partials);
  const int32_t work_tiles = q_tiles * p.kv_heads;
  if (split.first < work_tiles) split.kv_tiles = work(s.tiles[split.first / p.kv_heads]);
  const int32_t num_splits = PrefillSplit::num_splits(best_cost(split));
  *s.header = {q_tiles,
               0,
               0,
               tokens,
               num_splits > 1 ? split.first : work_tiles,
               num_splits,
               (split.kv_tiles + num_splits - 1) / num_splits,
               0};
  if (p.max_partials > 0) std::fill_n(s.counters, PrefillSchedule::kCounters, 0);
}
#endif

// Raises unless offsets are in order and the tiles of all requests have room in the schedule.
void check_tables(const Kernel& kernel, const PrefillPlanArgs& a, const PrefillPlanParams& p) {
  if (a.kv_indptr) {
    const Integers kv_indptr(kernel, a.kv_indptr);
    check_offsets(kv_indptr, INT32_MAX);
    if (a.last_page_len && !a.kv_len) check_last_page_len(kv_indptr, Integers(kernel, a.last_page_len), a.page_size);
  }
  if (a.kv_len) check_kv_len(kernel, a.kv_len, a.kv_indptr, a.pages_per_request, a.page_size);
  if (!a.qo_indptr) return;
  const Integers qo_indptr(kernel, a.qo_indptr);
  check_offsets(qo_indptr, INT32_MAX - 0xffff);  // 32-bit counters have room for a tile beyond the end
  int64_t tiles = 0;
  for (int64_t b = 0; b < p.batch; ++b) tiles += (qo_indptr[b + 1] - qo_indptr[b] + p.tile_tokens - 1) / p.tile_tokens;
  FI_CHECK(tiles <= p.max_tiles && tiles * std::max(p.kv_heads, 1) <= INT32_MAX, ValueError,
           "qo_indptr must need at most %d tiles of %d rows, for which schedule has room; got %lld", p.max_tiles,
           p.tile_tokens, static_cast<long long>(tiles));
}

void prefill_plan(const Kernel& kernel, const PrefillPlanArgs& a) {
  // 1 check
  constexpr int64_t largest = 0x7fffffff;
  const auto in_range = [](int64_t x, int64_t least, const char* name) {
    FI_CHECK(x >= least && x <= largest, ValueError, "%s must be in %lld..2^31 - 1; got %lld", name,
             static_cast<long long>(least), static_cast<long long>(x));
    return static_cast<int32_t>(x);
  };
  in_range(a.batch_size, 0, "batch_size");
  Dim words{"words"}, batch{"batch_size", a.batch_size}, bounds{"batch_size + 1", a.batch_size + 1};
  a.schedule.is({kI32}).contiguous().shape(words);
  if (a.qo_indptr) a.qo_indptr.is({kI32}).on(a.schedule).contiguous().shape(bounds);
  if (a.kv_indptr) a.kv_indptr.is({kI32}).on(a.schedule).contiguous().shape(bounds);
  if (a.last_page_len) a.last_page_len.is({kI32}).on(a.schedule).contiguous().shape(batch);
  if (a.kv_len) a.kv_len.is({kI32, kU32}).on(a.schedule).contiguous().shape(batch);
  const int64_t capacity = (words - PrefillSchedule::words(a.batch_size, 0)) / 2;
  FI_CHECK(capacity >= 0, ValueError, "schedule must have %lld words or more; got %lld",
           static_cast<long long>(PrefillSchedule::words(a.batch_size, 0)), static_cast<long long>(words));
  FI_CHECK(reinterpret_cast<uintptr_t>(a.schedule.data()) % 16 == 0, ValueError,
           "schedule must begin at a multiple of 16 bytes");

  // 2 shape
  PrefillPlanParams p{};
  p.schedule = PrefillSchedule::at(a.schedule.data<int32_t>(), a.batch_size);
  p.qo_indptr = a.qo_indptr ? a.qo_indptr.data<const int32_t>() : nullptr;
  p.kv_indptr = a.kv_indptr ? a.kv_indptr.data<const int32_t>() : nullptr;
  p.last_page_len = a.last_page_len ? a.last_page_len.data<const int32_t>() : nullptr;
  p.kv_len = a.kv_len ? a.kv_len.data<const int32_t>() : nullptr;
  p.batch = static_cast<int32_t>(a.batch_size);
  p.qo_len = in_range(a.qo_len, 0, "qo_len");
  p.page_size = in_range(a.page_size, 1, "page_size");
  p.pages_per_request = in_range(a.pages_per_request, 0, "pages_per_request");
  p.max_tiles = static_cast<int32_t>(std::min(capacity, largest));
  p.tile_tokens = in_range(a.tile_tokens, 1, "tile_tokens");
  p.kv_tile = 128;
  p.kv_heads = in_range(a.num_kv_heads, 0, "num_kv_heads");
  p.short_tile_tokens = in_range(a.short_tile_tokens, 0, "short_tile_tokens");
  p.max_partials = in_range(a.max_partials, 0, "max_partials");
  p.num_ctas = in_range(a.num_ctas, 0, "num_ctas");
  FI_CHECK(a.batch_size * std::max(a.qo_len, a.pages_per_request) <= largest, ValueError,
           "qo_len and pages_per_request must be below 2^31 / batch_size; got %lld, %lld and %lld",
           static_cast<long long>(a.qo_len), static_cast<long long>(a.pages_per_request),
           static_cast<long long>(a.batch_size));
  p.causal = a.causal != 0;
  p.window_left = static_cast<int32_t>(std::min(std::max<int64_t>(a.window_left, -1), largest));

  if (kernel.checks_contents(a.schedule.device())) check_tables(kernel, a, p);

  // 3 launch
#if FI_CUDA
  if (p.num_ctas == 0) p.num_ctas = static_cast<int32_t>(kernel.multiprocessors(a.schedule.device()));
  Launch config{1};
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries.front(), config, a.schedule.device(), p);
#else
  (void)kernel;
  if (p.num_ctas == 0) p.num_ctas = 1;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::prefill_plan)
