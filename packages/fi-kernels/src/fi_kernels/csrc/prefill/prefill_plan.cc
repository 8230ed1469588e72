// prefill_plan: the tiles of query rows of a batch, in the order in which blocks take them.
#include "fi/prefill/prefill_plan.h"

#include <algorithm>
#include <cstdint>

#include "fi/host/op.h"

namespace fi {
namespace {

#if !FI_CUDA
PrefillTiles tiles_of(const PrefillPlanParams& p, int32_t tokens) {
  PrefillTiles tiles{0, 0, 0};
  for (int32_t b = 0; b < p.batch; ++b) {
    const PrefillRequest r = p.request(b);
    for (int32_t t = 0; t < p.tiles(r, tokens); ++t) {
      const int32_t work = p.work(r, t, tokens);
      tiles.work += work;
      ++tiles.items;
      tiles.longest = std::max(tiles.longest, work);
    }
  }
  return tiles;
}

// As on the device.
void run_cpu(const PrefillPlanParams& p) {
  const PrefillSchedule& s = p.schedule;
  const auto least = [](const PrefillSplit& split) {
    uint32_t best = PrefillSplit::kNever;
    for (int32_t parts = 1; parts <= kMostParts; ++parts) best = std::min(best, split.cost(parts));
    return best;
  };
  PrefillTiles tiles = tiles_of(p, p.tile_tokens);
  int32_t tokens = p.tile_tokens, items = 0;
  if (p.short_tokens > 0 && int64_t{tiles.items} * p.kv_heads <= int64_t{4} * p.blocks) {
    const PrefillTiles low = tiles_of(p, p.short_tokens);
    if (low.items <= p.capacity && prefers_short(tiles, low, p.kv_heads, p.blocks, p.slots, least)) {
      tiles = low;
      tokens = p.short_tokens;
    }
  }
  for (int32_t b = 0; b < p.batch; ++b) {
    s.requests[b] = p.request(b);
    for (int32_t t = 0; t < p.tiles(s.requests[b], tokens) && items < p.capacity; ++t) s.items[items++] = {b, t};
  }
  const auto work = [&](const PrefillItem& x) { return p.work(s.requests[x.request], x.tile, tokens); };
  std::stable_sort(s.items, s.items + items,
                   [&](const PrefillItem& x, const PrefillItem& y) { return work(x) > work(y); });
  PrefillSplit split = PrefillSplit::of(tiles, p.kv_heads, p.blocks, p.slots);
  const int32_t units = items * p.kv_heads;
  if (split.first < units) split.work = work(s.items[split.first / p.kv_heads]);
  const int32_t parts = PrefillSplit::parts(least(split));
  *s.header = {items, 0, 0, tokens, parts > 1 ? split.first : units, parts, (split.work + parts - 1) / parts, 0};
  if (p.slots > 0) std::fill_n(s.counters, PrefillSchedule::kCounters, 0);
}
#endif

void plan(const Kernel& kernel, Tensor schedule, OptionalTensor qo_indptr, OptionalTensor kv_indptr,
          OptionalTensor last_page_len, OptionalTensor kv_len, int64_t batch_size, int64_t qo_len, int64_t page_size,
          int64_t pages_per_request, int64_t tile_tokens, int64_t causal, int64_t window_left, int64_t kv_heads,
          int64_t short_tokens, int64_t slots, int64_t blocks) {
  // 1 check
  constexpr int64_t largest = 0x7fffffff;
  const auto in_range = [](int64_t x, int64_t least, const char* name) {
    FI_CHECK(x >= least && x <= largest, ValueError, "%s must be in %lld..2^31 - 1; got %lld", name,
             static_cast<long long>(least), static_cast<long long>(x));
    return static_cast<int32_t>(x);
  };
  in_range(batch_size, 0, "batch_size");
  Dim words{"words"}, batch{"batch_size", batch_size}, bounds{"batch_size + 1", batch_size + 1};
  schedule.is({kI32}).contiguous().shape(words);
  if (qo_indptr) qo_indptr.is({kI32}).on(schedule).contiguous().shape(bounds);
  if (kv_indptr) kv_indptr.is({kI32}).on(schedule).contiguous().shape(bounds);
  if (last_page_len) last_page_len.is({kI32}).on(schedule).contiguous().shape(batch);
  if (kv_len) kv_len.is({kI32, kU32}).on(schedule).contiguous().shape(batch);
  const int64_t capacity = (words - PrefillSchedule::words(batch_size, 0)) / 2;
  FI_CHECK(capacity >= 0, ValueError, "schedule must have %lld words or more; got %lld",
           static_cast<long long>(PrefillSchedule::words(batch_size, 0)), static_cast<long long>(words));
  FI_CHECK(reinterpret_cast<uintptr_t>(schedule.data()) % 16 == 0, ValueError,
           "schedule must begin at a multiple of 16 bytes");

  // 2 shape
  PrefillPlanParams p{};
  p.schedule = PrefillSchedule::at(schedule.data<int32_t>(), batch_size);
  p.qo_indptr = qo_indptr ? qo_indptr.data<const int32_t>() : nullptr;
  p.kv_indptr = kv_indptr ? kv_indptr.data<const int32_t>() : nullptr;
  p.last_page_len = last_page_len ? last_page_len.data<const int32_t>() : nullptr;
  p.kv_len = kv_len ? kv_len.data<const int32_t>() : nullptr;
  p.batch = static_cast<int32_t>(batch_size);
  p.qo_len = in_range(qo_len, 0, "qo_len");
  p.page_size = in_range(page_size, 1, "page_size");
  p.pages_per_request = in_range(pages_per_request, 0, "pages_per_request");
  p.capacity = static_cast<int32_t>(std::min(capacity, largest));
  p.tile_tokens = in_range(tile_tokens, 1, "tile_tokens");
  p.key_tile = 128;
  p.kv_heads = in_range(kv_heads, 0, "kv_heads");
  p.short_tokens = in_range(short_tokens, 0, "short_tokens");
  p.slots = in_range(slots, 0, "slots");
  p.blocks = in_range(blocks, 0, "blocks");
  p.causal = causal != 0;
  p.window_left = static_cast<int32_t>(std::min(std::max<int64_t>(window_left, -1), largest));

  // 3 launch
#if FI_CUDA
  if (p.blocks == 0) p.blocks = static_cast<int32_t>(Kernel::multiprocessors(schedule.device()));
  Launch config{1};
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries.front(), config, schedule.device(), p);
#else
  (void)kernel;
  if (p.blocks == 0) p.blocks = 1;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::plan, "schedule", "qo_indptr", "kv_indptr", "last_page_len", "kv_len", "batch_size", "qo_len", "page_size",
      "pages_per_request", "tile_tokens", "causal", "window_left", "kv_heads", "short_tokens", "slots", "blocks")
