// Batch prefill on sm_80 and later: persistent CTAs take tiles of packed query rows from the schedule.
#pragma once
#include "fi/attention/mma_attention.cuh"
#include "fi/attention/prefill/batch_prefill.h"
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

// The work tiles of a grid. A q tile of the schedule has row_tiles tiles of the kernel's rows and `columns` tiles of
// the kernel's output columns, for each kv head. q tiles are outermost, so that the longest come first.
struct PrefillGrid {
  int count, kv_heads, row_tiles, columns;
};

// The next work tile of a CTA, and its entries of the schedule, which load while the CTA runs the present one.
struct NextWorkTile {
  PrefillRequest request;
  PrefillWorkTile entry;
  int work_tile, kv_head, row_tile, column;
  int loads;  // of two dependent loads, those issued

  // By one thread, whose earlier copies must have landed.
  FI_DEVICE void load_next(const PrefillSchedule& schedule, const PrefillGrid& grid) {
    if (loads == 0) {
      work_tile = take_tile(&schedule.header->next_work);
      if (work_tile < grid.count) cp_async_8(&entry, &schedule.tiles[index(grid)]);
    } else if (work_tile < grid.count) {
      cp_async_16(&request, &schedule.requests[entry.request]);
    }
    cp_async_commit();
    ++loads;
  }

 private:
  FI_DEVICE int index(const PrefillGrid& grid) {  // in the schedule
    int at = work_tile;
    row_tile = column = 0;
    if (grid.row_tiles * grid.columns > 1) {
      column = at % grid.columns, at /= grid.columns;
      row_tile = at % grid.row_tiles, at /= grid.row_tiles;
    }
    kv_head = at % grid.kv_heads;
    return at / grid.kv_heads;
  }
};

// CTAs take work tiles from a counter.
template <class T, class Q, class KV, class Shape, int kSharedBytes>
FI_DEVICE void batch_prefill_mma(const BatchPrefillParams& params, const Variant::Arguments& arguments = {}) {
  using Kernel = MmaAttention<T, Q, KV, PagedKv, Shape>;
  auto& shared = dynamic_shared<typename Kernel::Shared, 128, kSharedBytes>();
  __shared__ AttentionProblem problem;
  __shared__ Variant::Params variant_params;
  __shared__ PagedKv pages;
  __shared__ QueryTile tile;
  __shared__ NextWorkTile next_tile;
  // In shared memory: no registers are left to keep them over the loop.
  __shared__ PrefillGrid grid;
  __shared__ int q_tile_rows, work_tile;
  pdl_wait();
  const AttentionProblem& common = params.problem;
  if (threadIdx.x == 0) {
    q_tile_rows = params.schedule.header->tile_tokens * common.group();
    const int row_tiles = (q_tile_rows + Kernel::kRows - 1) / Kernel::kRows;
    const int columns = (common.head_dim_vo + Kernel::kColumns - 1) / Kernel::kColumns;
    grid = {params.schedule.header->num_tiles * common.kv_heads * row_tiles * columns, common.kv_heads, row_tiles,
            columns};
    next_tile.loads = 0;
    problem = common;
  }
  const auto load_next = [&] {
    if (threadIdx.x == 0) next_tile.load_next(params.schedule, grid);
  };
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) {
#pragma unroll 1
      while (next_tile.loads < 2) load_next(), cp_async_wait<0>();
      tile.rows = 0;
      work_tile = next_tile.work_tile;
      next_tile.loads = 0;
      if (work_tile < grid.count) {
        const PrefillWorkTile entry = next_tile.entry;
        const PrefillRequest request = next_tile.request;
        params.become(problem, entry.request, request, sizeof(Q), sizeof(KV), out_bytes(common.out_type));
        variant_params.set(arguments, problem);
        // Ragged keys are one long page; its page id is not used.
        const Divisor longest{0x7fffffff, 3, 31};
        if (params.pages.page_indices)
          pages = {params.pages.page_indices + request.kv_begin, params.pages.last_page, params.pages.page_size,
                   params.pages.k_page, params.pages.v_page};
        else
          pages = {&params.schedule.header->num_tiles, 0, longest, 0, 0};
        pages.set_v_table(params.pages.v_table_offset);
        const int begin = entry.q_tile * q_tile_rows, first = begin + next_tile.row_tile * Kernel::kRows;
        const int rows = min(Kernel::kRows, min(begin + q_tile_rows, problem.rows()) - first);
        tile = {entry.request, next_tile.kv_head, first, rows, next_tile.column * Kernel::kColumns};
      }
    }
    __syncthreads();
    if (work_tile >= grid.count) break;
    Kernel kernel(problem, shared, tile, pages);
    Variant variant(variant_params, tile.request);
    if (tile.rows > 0) kernel.attend(variant, params.copies.key_step.value > 1, load_next);
    if (tile.rows > 0) kernel.store(variant, params.scales.sinks);
    __syncthreads();
  }
  const PaddingRows padding = PaddingRows::of(params.padded_rows, params.batch_size, params.schedule.requests);
  for (int i = blockIdx.x; i < padding.count(); i += gridDim.x)
    for (int j = threadIdx.x; j < common.qo_heads * common.head_dim_vo; j += blockDim.x) {
      const int64_t at =
          padding.row(i) * common.out_token + j / common.head_dim_vo * common.out_head + j % common.head_dim_vo;
      zero(common.out, at, out_bytes(common.out_type));
    }
  pdl_launch_dependents();
  if (threadIdx.x == 0) retire_cta(&params.schedule.header->next_work, &params.schedule.header->ctas_done);
}

}  // namespace fi
