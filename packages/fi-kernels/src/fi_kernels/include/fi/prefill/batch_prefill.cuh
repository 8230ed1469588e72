// Batch prefill on sm_80 and later: persistent blocks take tiles of packed query rows from the schedule.
#pragma once
#include "fi/attention/tiles.cuh"
#include "fi/prefill/prefill_problem.h"

namespace fi {

// Units of work are parts of an item of as many rows as a tile has, for one kv head and Shape::kDimVO columns of the
// output: items slowest, so that the longest come first. Blocks take them from a counter.
template <class T, class Q, class KV, class Shape, int kSharedBytes>
FI_DEVICE void prefill_tiles(const PrefillProblem& params, const Variant::Arguments& arguments = {}) {
  using Kernel = TilesKernel<T, Q, KV, PagedTokens, Shape>;
  auto& shared = aligned_shared<typename Kernel::Shared, kSharedBytes>();
  __shared__ AttentionProblem problem;
  __shared__ Variant::Params variant_params;
  __shared__ PagedTokens pages;
  __shared__ TileOfRows tile;
  __shared__ int unit;
  pdl_wait();
  const AttentionProblem& common = params.problem;
  const int item_rows = params.tile_tokens * common.group;
  const int parts = (item_rows + Kernel::kRows - 1) / Kernel::kRows;
  const int columns = (common.dim_vo + Kernel::kColumns - 1) / Kernel::kColumns;
  const int units = params.schedule.header[0] * common.kv_heads * parts * columns;
  if (threadIdx.x == 0) {
    unit = atomicAdd(params.schedule.header + 1, 1);
    problem = common;
  }
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) {
      tile.rows = 0;
      if (unit < units) {
        const int part = unit / columns % parts, at = unit / columns / parts;
        const PrefillItem item = params.schedule.items[at / common.kv_heads];
        const PrefillRequest request = params.schedule.requests[item.request];
        params.become(problem, item.request, request, sizeof(Q), sizeof(KV), out_bytes(common.out_type));
        variant_params.set(arguments, problem);
        // Ragged keys are one long page, whose number does not matter.
        const Divisor longest{0x7fffffff, 3, 31};
        if (params.pages)
          pages = {params.pages + request.kv_begin, params.page_size, params.k_page, params.v_page};
        else
          pages = {params.schedule.header, longest, 0, 0};
        const int begin = item.tile * item_rows, first = begin + part * Kernel::kRows;
        const int rows = min(Kernel::kRows, min(begin + item_rows, problem.rows()) - first);
        tile = {item.request, at % common.kv_heads, first, rows, unit % columns * Kernel::kColumns};
      }
    }
    __syncthreads();
    if (unit >= units) break;
    Kernel kernel(problem, shared, tile, pages);
    Variant variant(variant_params, tile.request);
    if (tile.rows > 0) kernel.attend(variant);
    int next = 0;
    if (threadIdx.x == 0) next = atomicAdd(params.schedule.header + 1, 1);  // the answer comes during the output
    if (tile.rows > 0) kernel.store(variant, params.sinks);
    __syncthreads();
    if (threadIdx.x == 0) unit = next;
  }
  pdl_launch_dependents();
  if (threadIdx.x == 0 && atomicAdd(params.schedule.header + 2, 1) == static_cast<int>(gridDim.x) - 1)
    params.schedule.header[1] = params.schedule.header[2] = 0;
}

}  // namespace fi
