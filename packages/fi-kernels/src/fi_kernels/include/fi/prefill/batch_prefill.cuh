// Batch prefill on sm_80 and later: persistent blocks take tiles of 64 packed query rows from the schedule.
#pragma once
#include "fi/attention/tiles.cuh"
#include "fi/prefill/prefill_problem.h"

namespace fi {

// Units of work are parts of 64 rows of an item, for one kv head and 128 columns of the output: items slowest, so that
// the longest come first. Blocks take them from a counter.
template <class T, class Q, class KV, int kSharedBytes>
FI_DEVICE void prefill_tiles(const PrefillProblem& params, const Variant::Arguments& arguments = {}) {
  extern __shared__ uint4 bytes[];
  using Kernel = TilesKernel<T, Q, KV, TokensOfEither>;
  static_assert(sizeof(typename Kernel::Shared) == kSharedBytes, "the family's Python says how much to ask for");
  __shared__ AttentionProblem problem;
  __shared__ Variant::Params variant_params;
  __shared__ int next_unit;
  pdl_wait();
  const AttentionProblem& common = params.problem;
  const int item_rows = params.schedule.header->tile_tokens * common.group;
  const int parts = (item_rows + Kernel::kRows - 1) / Kernel::kRows;
  const int columns = (common.dim_vo + Kernel::kColumns - 1) / Kernel::kColumns;
  const int units = params.schedule.header->items * common.kv_heads * parts * columns;
  if (threadIdx.x == 0) next_unit = atomicAdd(&params.schedule.header->next, 1);
#pragma unroll 1
  while (true) {
    __syncthreads();  // the unit before has been finished
    const int unit = next_unit;
    if (unit >= units) break;
    __syncthreads();
    const int column = unit % columns, part = unit / columns % parts, at = unit / columns / parts;
    const int kv_head = at % common.kv_heads;
    const PrefillItem item = params.schedule.items[at / common.kv_heads];
    if (threadIdx.x == 0) {
      problem = params.request(item.request, sizeof(Q), sizeof(KV), out_bytes(common.out_type));
      variant_params.set(arguments, problem);
      next_unit = atomicAdd(&params.schedule.header->next, 1);
    }
    __syncthreads();
    const int begin = item.tile * item_rows, first = begin + part * Kernel::kRows;
    const int end = min(begin + item_rows, problem.rows());
    if (first >= end) continue;
    const int32_t* ids = params.pages ? params.pages + params.schedule.requests[item.request].kv_begin : nullptr;
    const TokensOfEither pages{{ids, params.page_size, params.k_page, params.v_page}};
    Kernel kernel(problem, *reinterpret_cast<typename Kernel::Shared*>(bytes), kv_head, first, end,
                  column * Kernel::kColumns, pages);
    Variant variant(variant_params, item.request);
    kernel.attend(variant);
    kernel.store(variant, params.sinks);
  }
  pdl_launch_dependents();
  if (threadIdx.x == 0 && atomicAdd(&params.schedule.header->done, 1) == static_cast<int>(gridDim.x) - 1)
    params.schedule.header->next = params.schedule.header->done = 0;
}

}  // namespace fi
