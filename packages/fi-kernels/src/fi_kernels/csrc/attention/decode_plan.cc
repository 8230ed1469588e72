// decode_plan: the schedule of batch decode from the lengths of its requests.
#include "fi/attention/decode/decode_plan.h"

#include <algorithm>
#include <vector>

#include "fi/attention/lengths.h"
#include "fi/generated/decode_plan.h"

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
  const DecodePartition partition = decode_partition(p, cost, uniform);
  schedule.header() = decode_header(p, partition, chunks);
  DecodeRangeStart* starts = schedule.starts();
  std::vector<int64_t> keys;
  for (int32_t g = 0; g <= p.num_ranges; ++g) {
    starts[g] = decode_start(p, partition, g, requests);
    keys.push_back(decode_key(p, starts[g]));
  }
  for (int32_t g = 0; g < p.num_ranges; ++g) decode_link_splits(p, starts[g], keys.data());
  std::fill_n(schedule.counters(), p.counters, 0);
}
#endif

// Raises unless offsets are in order and 32 bits count the key tiles of all requests.
void check_tables(const Kernel& kernel, const DecodePlanArgs& a, int64_t batch) {
  int64_t pages = batch * a.pages_per_request;
  if (a.indptr) {
    const Integers indptr(kernel, a.indptr);
    check_offsets(indptr, INT32_MAX);
    if (a.last_page_len) check_last_page_len(indptr, Integers(kernel, a.last_page_len), a.page_size);
    pages = indptr[batch];
  }
  if (a.kv_len) check_kv_len(kernel, a.kv_len, a.indptr, a.pages_per_request, a.page_size);
  FI_CHECK(pages * a.page_size / kDecodeKvTile + batch * (kWorkTileCost + 1) <= INT32_MAX, ValueError,
           "the page table must have fewer than 2^31 tiles of %d keys; got %lld pages of %lld", kDecodeKvTile,
           static_cast<long long>(pages), static_cast<long long>(a.page_size));
}

void decode_plan(const Kernel& kernel, const DecodePlanArgs& a) {
  // 1 check
  Dim batch{"batch_size"}, words{"words"};
  a.schedule.is({kI32}).contiguous().shape(words);
  if (a.kv_len) a.kv_len.is({kI32, kU32, kI64}).on(a.schedule).contiguous().shape(batch);
  if (a.last_page_len) a.last_page_len.is({kI32}).on(a.schedule).contiguous().shape(batch);
  FI_CHECK(a.kv_len || a.last_page_len, ValueError, "kv_len or last_page_len must be given");
  FI_CHECK(a.indptr || a.kv_len, ValueError, "kv_len must be given where indptr is not");
  if (a.indptr) {
    Dim bounds{"batch_size + 1", batch + 1};
    a.indptr.is({kI32}).on(a.schedule).contiguous().shape(bounds);
  }
  constexpr int64_t largest = 0x7fffffff;
  FI_CHECK(a.page_size > 0 && a.page_size <= largest, ValueError, "page_size must be positive; got %lld",
           static_cast<long long>(a.page_size));
  FI_CHECK(a.pages_per_request >= 0 && a.pages_per_request <= largest, ValueError,
           "pages_per_request must not be negative; got %lld", static_cast<long long>(a.pages_per_request));
  FI_CHECK(a.q_tiles > 0 && a.q_tiles <= largest / std::max<int64_t>(batch, 1), ValueError,
           "q_tiles must be positive and less than 2^31 / batch_size; got %lld", static_cast<long long>(a.q_tiles));
  FI_CHECK(a.q_len > 0 && a.q_len <= largest, ValueError, "q_len must be positive; got %lld",
           static_cast<long long>(a.q_len));
  FI_CHECK(a.num_ranges > 0 && a.num_ranges <= kDecodeMaxRanges, ValueError, "num_ranges must be in 1..%d; got %lld",
           kDecodeMaxRanges, static_cast<long long>(a.num_ranges));
  FI_CHECK(a.num_ctas > 0 && a.num_ctas <= a.num_ranges, ValueError, "num_ctas must be in 1..%lld; got %lld",
           static_cast<long long>(a.num_ranges), static_cast<long long>(a.num_ctas));
  const int64_t counters = words - decode_counters_offset(a.num_ranges, batch), partials = 2 * a.num_ranges;
  FI_CHECK(counters >= partials, ValueError, "schedule must have %lld words or more; got %lld",
           static_cast<long long>(words - counters + partials), static_cast<long long>(words));
  FI_CHECK(reinterpret_cast<uintptr_t>(a.schedule.data()) % 16 == 0, ValueError,
           "schedule must begin at a multiple of 16 bytes");

  if (kernel.checks_contents(a.schedule.device())) check_tables(kernel, a, batch);

  // 2 shape
  DecodePlanParams p{};
  p.schedule = a.schedule.data<int32_t>();
  p.indptr = a.indptr ? a.indptr.data<const int32_t>() : nullptr;
  p.last_page_len = a.last_page_len ? a.last_page_len.data<const int32_t>() : nullptr;
  p.kv_len = a.kv_len ? a.kv_len.data<const void>() : nullptr;
  p.kv_len_is_wide = a.kv_len && a.kv_len.dtype() == kI64;
  p.pages_per_request = a.pages_per_request;
  p.batch = static_cast<int32_t>(batch);
  p.page_size = static_cast<int32_t>(a.page_size);
  p.q_tiles = static_cast<int32_t>(a.q_tiles);
  p.queries = {static_cast<int32_t>(a.q_len),
               static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(a.window_left, -1), largest))};
  p.num_ctas = static_cast<int32_t>(a.num_ctas);
  p.num_ranges = static_cast<int32_t>(a.num_ranges);
  p.split_kv = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(a.split_kv, -1), 1 << 24));
  p.counters = static_cast<int32_t>(std::min<int64_t>(counters, largest));

  // 3 launch
#if FI_CUDA
  Launch config{1};
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries.front(), config, a.schedule.device(), p);
#else
  (void)kernel;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::decode_plan)
