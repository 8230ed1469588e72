// Batch prefill on sm_80 and later: persistent blocks take tiles of packed query rows from the schedule.
#pragma once
#include "fi/attention/mma_attention.cuh"
#include "fi/attention/prefill/prefill_problem.h"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/tile_scheduler.cuh"

namespace fi {

// Element `at` of 1, 2 or 4 bytes becomes zero.
FI_DEVICE void zero(void* data, int64_t at, int bytes) {
  if (bytes == 1)
    static_cast<uint8_t*>(data)[at] = 0;
  else if (bytes == 2)
    static_cast<uint16_t*>(data)[at] = 0;
  else
    static_cast<uint32_t*>(data)[at] = 0;
}

// Units of work are parts of an item of as many rows as a tile has, for one kv head and some columns of the output:
// items slowest, so that the longest come first.
struct PrefillGrid {
  int count, kv_heads, parts, columns;
};

// A unit that a block has taken, and what the schedule says of it: asked for while the block is busy.
struct NextWorkTile {
  PrefillRequest request;
  PrefillWorkTile item;
  int unit, kv_head, part, column;
  int asked;  // how many of the two questions

  // By one thread, whose copies must have landed before it asks on.
  FI_DEVICE void ask(const PrefillSchedule& schedule, const PrefillGrid& units) {
    if (asked == 0) {
      unit = take_tile(&schedule.header->next_work);
      if (unit < units.count) cp_async_8(&item, &schedule.tiles[place(units)]);
    } else if (unit < units.count) {
      cp_async_16(&request, &schedule.requests[item.request]);
    }
    cp_async_commit();
    ++asked;
  }

 private:
  FI_DEVICE int place(const PrefillGrid& units) {  // of the item
    int at = unit;
    part = column = 0;
    if (units.parts * units.columns > 1) {
      column = at % units.columns, at /= units.columns;
      part = at % units.parts, at /= units.parts;
    }
    kv_head = at % units.kv_heads;
    return at / units.kv_heads;
  }
};

// Blocks take units from a counter.
template <class T, class Q, class KV, class Shape, int kSharedBytes>
FI_DEVICE void prefill_tiles(const PrefillProblem& params, const Variant::Arguments& arguments = {}) {
  using Kernel = MmaAttention<T, Q, KV, PagedKv, Shape>;
  auto& shared = dynamic_shared<typename Kernel::Shared, 128, kSharedBytes>();
  __shared__ AttentionProblem problem;
  __shared__ Variant::Params variant_params;
  __shared__ PagedKv pages;
  __shared__ QueryTile tile;
  __shared__ NextWorkTile coming;
  // Shared, for there are no registers to keep them over the loop.
  __shared__ PrefillGrid units;
  __shared__ int item_rows, unit;
  pdl_wait();
  const AttentionProblem& common = params.problem;
  if (threadIdx.x == 0) {
    item_rows = params.schedule.header->tile_tokens * common.group_size;
    const int parts = (item_rows + Kernel::kRows - 1) / Kernel::kRows;
    const int columns = (common.head_dim_vo + Kernel::kColumns - 1) / Kernel::kColumns;
    units = {params.schedule.header->num_tiles * common.kv_heads * parts * columns, common.kv_heads, parts, columns};
    coming.asked = 0;
    problem = common;
  }
  const auto ask = [&] {
    if (threadIdx.x == 0) coming.ask(params.schedule, units);
  };
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) {
#pragma unroll 1
      while (coming.asked < 2) ask(), cp_async_wait<0>();
      tile.rows = 0;
      unit = coming.unit;
      coming.asked = 0;
      if (unit < units.count) {
        const PrefillWorkTile item = coming.item;
        const PrefillRequest request = coming.request;
        params.become(problem, item.request, request, sizeof(Q), sizeof(KV), out_bytes(common.out_type));
        variant_params.set(arguments, problem);
        // Ragged keys are one long page, whose number does not matter.
        const Divisor longest{0x7fffffff, 3, 31};
        if (params.page_indices)
          pages = {params.page_indices + request.kv_begin, params.page_size, params.k_page, params.v_page};
        else
          pages = {&params.schedule.header->num_tiles, longest, 0, 0};
        const int begin = item.q_tile * item_rows, first = begin + coming.part * Kernel::kRows;
        const int rows = min(Kernel::kRows, min(begin + item_rows, problem.rows()) - first);
        tile = {item.request, coming.kv_head, first, rows, coming.column * Kernel::kColumns};
      }
    }
    __syncthreads();
    if (unit >= units.count) break;
    Kernel kernel(problem, shared, tile, pages);
    Variant variant(variant_params, tile.request);
    if (tile.rows > 0) kernel.attend(variant, ask);
    if (tile.rows > 0) kernel.store(variant, params.sinks);
    __syncthreads();
  }
  const PaddingRows rest = PaddingRows::of(params.padded_rows, params.batch, params.schedule.requests);
  for (int i = blockIdx.x; i < rest.count(); i += gridDim.x)
    for (int j = threadIdx.x; j < common.qo_heads * common.head_dim_vo; j += blockDim.x) {
      const int64_t at =
          rest.row(i) * common.out_token + j / common.head_dim_vo * common.out_head + j % common.head_dim_vo;
      zero(common.out, at, out_bytes(common.out_type));
    }
  pdl_launch_dependents();
  if (threadIdx.x == 0) retire_cta(&params.schedule.header->next_work, &params.schedule.header->ctas_done);
}

}  // namespace fi
