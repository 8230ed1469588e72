// mla_plan: the schedules of batch MLA from the lengths of its requests.
#include <algorithm>
#include <vector>

#include "fi/attention/lengths.h"
#include "fi/attention/mla/batch_mla.h"
#include "fi/attention/mla/mla_plan.h"
#include "fi/generated/mla_plan.h"
#include "fi/host/op.h"

namespace fi {
namespace {

#if !FI_CUDA
template <bool kChunks>
void run_cpu(const MlaPlanParams& p, int32_t kind) {
  const MlaSchedule schedule = p.view(kind);
  MlaRequest* requests = schedule.requests();
  int64_t cost = 0;
  bool uniform = true;
  for (int32_t b = 0; b < p.batch; ++b) {
    requests[b] = mla_request(p, b, p.tile_rows[kind]);
    requests[b].cost = cost;
    cost += mla_cost<kChunks>(requests[b], p.chunk_tiles[kind]);
    uniform =
        uniform && requests[b].q_tiles == requests[0].q_tiles && requests[b].item_cost() == requests[0].item_cost();
  }
  const MlaPartition partition = mla_partition<kChunks>(p, kind, cost, p.batch ? requests[0] : MlaRequest{}, uniform);
  MlaRangeStart* starts = schedule.starts();
  std::vector<int64_t> keys;
  const auto find = [&](int64_t at) {
    return last_not_above(p.batch, at, [&](int32_t b) { return requests[b].cost; });
  };
  for (int32_t g = 0; g <= p.max_ranges; ++g) {
    starts[g] = mla_start<kChunks>(p, partition, g, requests, find);
    keys.push_back(mla_key(starts[g]));
  }
  int32_t max_splits = 1;
  for (int32_t g = 0; g <= p.max_ranges; ++g) {
    mla_link_splits(starts[g], p.max_ranges + 1, keys.data());
    schedule.arrivals()[g] = {};
    max_splits = std::max(max_splits, starts[g].num_splits);
  }
  schedule.header() = {partition.ranges, partition.cut_tiles, max_splits, mla_header_cost<kChunks>(partition)};
}
#endif

void check_tables(const Kernel& kernel, const MlaPlanArgs& a) {
  if (a.kv_indptr) check_offsets(Integers(kernel, a.kv_indptr), INT32_MAX);
  if (a.qo_indptr) check_offsets(Integers(kernel, a.qo_indptr), INT32_MAX);
  if (a.kv_len) check_kv_len(kernel, a.kv_len, a.kv_indptr, a.pages_per_request, a.page_size);
}

void mla_plan(const Kernel& kernel, const MlaPlanArgs& a) {
  // 1 check
  constexpr int64_t largest = 0x7fffffff;
  Dim kinds{"2", kMlaSchedules}, words{"words"}, batch{"batch_size"};
  a.schedule.is({kI32}).contiguous().shape(kinds, words);
  if (a.kv_len)
    a.kv_len.is({kI32, kI64}).on(a.schedule).contiguous().shape(batch);
  else
    batch = Dim{"batch_size", a.batch_size};
  Dim bounds{"batch_size + 1", batch + 1};
  if (a.kv_indptr) a.kv_indptr.is({kI32}).on(a.schedule).contiguous().shape(bounds);
  if (a.context_lens) a.context_lens.is({kI32}).on(a.schedule).contiguous().shape(batch);
  if (a.qo_indptr) a.qo_indptr.is({kI32}).on(a.schedule).contiguous().shape(bounds);
  FI_CHECK(a.page_size > 0 && a.page_size <= largest, ValueError, "page_size must be positive; got %lld",
           static_cast<long long>(a.page_size));
  FI_CHECK(a.heads > 0 && a.heads <= 65536, ValueError, "num_heads must be in 1..65536; got %lld",
           static_cast<long long>(a.heads));
  FI_CHECK(a.qo_len >= 0 && a.qo_len * a.heads <= largest, ValueError, "qo_len must not be negative; got %lld",
           static_cast<long long>(a.qo_len));
  FI_CHECK(a.pages_per_request >= 0 && a.pages_per_request <= largest, ValueError,
           "pages_per_request must not be negative; got %lld", static_cast<long long>(a.pages_per_request));
  FI_CHECK(a.max_ranges > 0 && a.max_ranges <= kMlaMaxRanges && a.narrow_ranges > 0 && a.wide_ranges > 0 &&
               std::max(a.narrow_ranges, a.wide_ranges) <= a.max_ranges,
           ValueError,
           "narrow_ranges and wide_ranges must be in 1..max_ranges, and that at most %d; got %lld, %lld, %lld",
           kMlaMaxRanges, static_cast<long long>(a.narrow_ranges), static_cast<long long>(a.wide_ranges),
           static_cast<long long>(a.max_ranges));
  FI_CHECK(batch >= 0 && batch <= largest, ValueError, "batch_size must not be negative; got %lld",
           static_cast<long long>(batch));
  FI_CHECK(a.narrow_rows > 0 && a.wide_rows > 0, ValueError, "narrow_rows and wide_rows must be positive");
  FI_CHECK(a.fixed_splits || !a.fine_splits, ValueError, "fine_splits must come with fixed_splits");
  FI_CHECK(a.workspace_floats >= 0, ValueError, "workspace_floats must not be negative; got %lld",
           static_cast<long long>(a.workspace_floats));
  const int64_t least = mla_schedule_words(a.max_ranges, batch);
  FI_CHECK(
      words >= least && words % 4 == 0 && reinterpret_cast<uintptr_t>(a.schedule.data()) % 16 == 0, ValueError,
      "schedule must have rows of %lld words or more, a multiple of 4, and begin at a multiple of 16 bytes; got %s",
      static_cast<long long>(least), a.schedule.shape_str().c_str());
  if (kernel.checks_contents(a.schedule.device())) check_tables(kernel, a);

  // 2 shape
  MlaPlanParams p{};
  p.schedule = a.schedule.data<int32_t>();
  p.qo_indptr = a.qo_indptr ? a.qo_indptr.data<const int32_t>() : nullptr;
  p.kv_indptr = a.kv_indptr ? a.kv_indptr.data<const int32_t>() : nullptr;
  p.kv_len = a.kv_len ? a.kv_len.data() : nullptr;
  p.context = a.context_lens ? a.context_lens.data<const int32_t>() : nullptr;
  p.whole = !a.split_kv;
  p.kv_len_is_wide = a.kv_len && a.kv_len.dtype() == kI64;
  p.schedule_words = words;
  p.pages_per_request = a.pages_per_request;
  p.batch = static_cast<int32_t>(batch);
  p.page_size = static_cast<int32_t>(a.page_size);
  p.heads = static_cast<int32_t>(a.heads);
  p.qo_len = static_cast<int32_t>(a.qo_len);
  p.max_ranges = static_cast<int32_t>(a.max_ranges);
  p.tile_rows[0] = static_cast<int32_t>(a.narrow_rows), p.tile_rows[1] = static_cast<int32_t>(a.wide_rows);
  p.ranges[0] = static_cast<int32_t>(a.narrow_ranges), p.ranges[1] = static_cast<int32_t>(a.wide_ranges);
  for (int kind = 0; kind < kMlaSchedules; ++kind) {
    BatchMlaParams run{};
    run.tile_rows = p.tile_rows[kind];
    p.slots[kind] = static_cast<int32_t>(std::min(largest, a.workspace_floats / run.partial_floats()));
    p.chunk_tiles[kind] = kind == 0 && a.fine_splits ? kMlaFineTiles : kMlaChunkTiles;
  }

  // 3 launch
#if FI_CUDA
  Launch config{kMlaSchedules};
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries[a.fixed_splits], config, a.schedule.device(), p);
#else
  (void)kernel;
  for (int32_t kind = 0; kind < kMlaSchedules; ++kind)
    a.fixed_splits ? run_cpu<true>(p, kind) : run_cpu<false>(p, kind);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::mla_plan)
