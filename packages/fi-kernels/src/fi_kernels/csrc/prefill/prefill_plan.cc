// prefill_plan: the tiles of query rows of a batch, in the order in which blocks take them.
#include "fi/prefill/prefill_plan.h"

#include <algorithm>
#include <cstdint>

#include "fi/host/op.h"

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const PrefillPlanParams& p) {
  const PrefillSchedule& s = p.schedule;
  int32_t items = 0;
  for (int32_t b = 0; b < p.batch; ++b) {
    s.requests[b] = p.request(b);
    for (int32_t t = 0; t < p.tiles(s.requests[b]) && items < p.capacity; ++t) s.items[items++] = {b, t};
  }
  std::stable_sort(s.items, s.items + items, [&](const PrefillItem& x, const PrefillItem& y) {
    return p.work(s.requests[x.request], x.tile) > p.work(s.requests[y.request], y.tile);
  });
  s.header[0] = items;
  s.header[1] = s.header[2] = 0;
}
#endif

void plan(const Kernel& kernel, Tensor schedule, OptionalTensor qo_indptr, OptionalTensor kv_indptr,
          OptionalTensor last_page_len, OptionalTensor kv_len, int64_t batch_size, int64_t qo_len, int64_t page_size,
          int64_t pages_per_request, int64_t tile_tokens, int64_t causal, int64_t window_left) {
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
  p.causal = causal != 0;
  p.window_left = static_cast<int32_t>(std::min(std::max<int64_t>(window_left, -1), largest));

  // 3 launch
#if FI_CUDA
  Launch config{1};
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries.front(), config, schedule.device(), p);
#else
  (void)kernel;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::plan, "schedule", "qo_indptr", "kv_indptr", "last_page_len", "kv_len", "batch_size", "qo_len", "page_size",
      "pages_per_request", "tile_tokens", "causal", "window_left")
