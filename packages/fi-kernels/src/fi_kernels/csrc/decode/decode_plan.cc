// decode_plan: the schedule of batch decode from the lengths of its requests.
#include "fi/decode/decode_plan.h"

#include <algorithm>
#include <vector>

#include "fi/host/op.h"

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const DecodePlanParams& p) {
  const DecodeSchedule schedule = p.view();
  DecodeRequest* requests = schedule.requests();
  int32_t cost = 0, chunks = 0;
  bool uniform = true;
  for (int32_t b = 0; b < p.batch; ++b) {
    requests[b] = decode_request(p, b);
    requests[b].cost = cost, requests[b].chunks = chunks;
    const DecodeCost one = decode_cost(p, requests[b].kv_len);
    cost += one.tiles, chunks += one.chunks;
    uniform = uniform && one.tiles == decode_cost(p, requests[0].kv_len).tiles;
  }
  const DecodeDivision division = decode_division(p, cost, uniform);
  schedule.header() = decode_header(p, division, chunks);
  DecodeStart* starts = schedule.starts();
  std::vector<int64_t> keys;
  for (int32_t g = 0; g <= p.ranges; ++g) {
    starts[g] = decode_start(p, division, g, requests);
    keys.push_back(decode_key(p, starts[g]));
  }
  for (int32_t g = 0; g < p.ranges; ++g) decode_cut(p, starts[g], keys.data());
  std::fill_n(schedule.counters(), p.counters, 0);
}
#endif

void plan(const Kernel& kernel, Tensor schedule, OptionalTensor indptr, OptionalTensor last_page_len,
          OptionalTensor kv_len, int64_t page_size, int64_t pages_per_request, int64_t units, int64_t q_len,
          int64_t window_left, int64_t blocks, int64_t ranges, int64_t split) {
  // 1 check
  Dim batch{"batch_size"}, words{"words"};
  schedule.is({kI32}).contiguous().shape(words);
  if (kv_len) kv_len.is({kI32, kU32, kI64}).on(schedule).contiguous().shape(batch);
  if (last_page_len) last_page_len.is({kI32}).on(schedule).contiguous().shape(batch);
  FI_CHECK(kv_len || last_page_len, ValueError, "kv_len or last_page_len must be given");
  FI_CHECK(indptr || kv_len, ValueError, "kv_len must be given where indptr is not");
  if (indptr) {
    Dim bounds{"batch_size + 1", batch + 1};
    indptr.is({kI32}).on(schedule).contiguous().shape(bounds);
  }
  constexpr int64_t largest = 0x7fffffff;
  FI_CHECK(page_size > 0 && page_size <= largest, ValueError, "page_size must be positive; got %lld",
           static_cast<long long>(page_size));
  FI_CHECK(pages_per_request >= 0 && pages_per_request <= largest, ValueError,
           "pages_per_request must not be negative; got %lld", static_cast<long long>(pages_per_request));
  FI_CHECK(units > 0 && units * std::max<int64_t>(batch, 1) <= largest, ValueError,
           "units must be positive and less than 2^31 / batch_size; got %lld", static_cast<long long>(units));
  FI_CHECK(q_len > 0 && q_len <= largest, ValueError, "q_len must be positive; got %lld",
           static_cast<long long>(q_len));
  FI_CHECK(ranges > 0 && ranges <= kDecodeMostRanges, ValueError, "ranges must be in 1..%d; got %lld",
           kDecodeMostRanges, static_cast<long long>(ranges));
  FI_CHECK(blocks > 0 && blocks <= ranges, ValueError, "blocks must be in 1..%lld; got %lld",
           static_cast<long long>(ranges), static_cast<long long>(blocks));
  const int64_t counters = words - decode_counters_offset(ranges, batch), slots = 2 * ranges;
  FI_CHECK(counters >= slots, ValueError, "schedule must have %lld words or more; got %lld",
           static_cast<long long>(words - counters + slots), static_cast<long long>(words));
  FI_CHECK(reinterpret_cast<uintptr_t>(schedule.data()) % 16 == 0, ValueError,
           "schedule must begin at a multiple of 16 bytes");

  // 2 shape
  DecodePlanParams p{};
  p.schedule = schedule.data<int32_t>();
  p.indptr = indptr ? indptr.data<const int32_t>() : nullptr;
  p.last_page_len = last_page_len ? last_page_len.data<const int32_t>() : nullptr;
  p.kv_len = kv_len ? kv_len.data<const void>() : nullptr;
  p.kv_len_is_wide = kv_len && kv_len.dtype() == kI64;
  p.pages_per_request = pages_per_request;
  p.batch = static_cast<int32_t>(batch);
  p.page_size = static_cast<int32_t>(page_size);
  p.units = static_cast<int32_t>(units);
  p.q_len = static_cast<int32_t>(q_len);
  p.window_left = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(window_left, -1), largest));
  p.blocks = static_cast<int32_t>(blocks);
  p.ranges = static_cast<int32_t>(ranges);
  p.split = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(split, -1), 1 << 24));
  p.counters = static_cast<int32_t>(std::min<int64_t>(counters, largest));

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

FI_OP(fi::plan, "schedule", "indptr", "last_page_len", "kv_len", "page_size", "pages_per_request", "units", "q_len",
      "window_left", "blocks", "ranges", "split")
