// Copies new K and V rows into the pages of their requests: one vector a thread and row, several rows in flight.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/page/append_paged_kv_cache.h"

namespace fi {

// W is the word moved, kWords of them at once. Lanes of a row run over the heads of K, then over those of V, so a block
// writes whole rows; rows of a thread are a block's height apart.
template <class W, int kWords, int kRows>
FI_DEVICE void append_rows(const AppendParams& p) {
  constexpr int kBytes = sizeof(W) * kWords;
  const int height = blockDim.x / p.lanes, place = threadIdx.x / p.lanes;
  const int lane = blockIdx.y * p.lanes + threadIdx.x - place * p.lanes;
  const int k_lanes = p.heads * (p.k.bytes / kBytes), v_lanes = p.heads * (p.v.bytes / kBytes);
  const bool second = lane >= k_lanes;
  const AppendSide side = second ? p.v : p.k;
  const int at = second ? lane - k_lanes : lane;
  const int head = at / (side.bytes / kBytes);
  const int64_t offset = static_cast<int64_t>(at) * kBytes - static_cast<int64_t>(head) * side.bytes;
  const char* from = side.from + head * side.from_head + offset;
  char* to = side.to + head * side.to_head + offset;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * height * kRows + place;
  const int64_t end = place < height && lane < k_lanes + v_lanes ? p.rows : 0;

  pdl_wait();
  Vec<W, kWords> data[kRows];
  int32_t batch[kRows], position[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + i * height;
    batch[i] = -1;
    position[i] = 0;
    if (row < end) {
      batch[i] = p.batch_indices[row];
      position[i] = p.positions[row];
      data[i] = load<W, kWords>(reinterpret_cast<const W*>(from + row * side.from_row));
    }
  }
  pdl_launch_dependents();
  // In three loops of loads without branches, so that the rows wait for memory together.
  int32_t page[kRows], slot[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) page[i] = p.kv_indptr[max(batch[i], 0)];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t t = position[i], pages = divide(t, p.page_size);
    slot[i] = t - pages * p.page_size.value;
    if (batch[i] >= 0) page[i] = p.kv_indices[static_cast<int64_t>(page[i]) + pages];
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (batch[i] >= 0) store(reinterpret_cast<W*>(to + page[i] * side.to_page + slot[i] * side.to_slot), data[i]);
}

}  // namespace fi
