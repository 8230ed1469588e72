// Copies new K and V rows into the pages of their requests: a thread copies one vector of each of several rows.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/page/append_paged_kv_cache.h"

namespace fi {

// A vector is kWordsPerVec words of type Word. The threads of a row cover the heads of K, then the heads of V, so a CTA
// copies whole rows. The rows of one thread are rows_per_pass apart.
template <class Word, int kWordsPerVec, int kRowsPerThread>
FI_DEVICE void append_rows(const AppendParams& p) {
  constexpr int kVecBytes = sizeof(Word) * kWordsPerVec;
  const int rows_per_pass = blockDim.x / p.threads_per_row, row_in_pass = threadIdx.x / p.threads_per_row;
  const int lane = blockIdx.y * p.threads_per_row + threadIdx.x - row_in_pass * p.threads_per_row;
  const int k_vectors = p.heads * (p.k.head_bytes / kVecBytes), v_vectors = p.heads * (p.v.head_bytes / kVecBytes);
  const bool is_v = lane >= k_vectors;
  const AppendOperand operand = is_v ? p.v : p.k;
  const int vector = is_v ? lane - k_vectors : lane;
  const int head = vector / (operand.head_bytes / kVecBytes);
  const int64_t offset = static_cast<int64_t>(vector) * kVecBytes - static_cast<int64_t>(head) * operand.head_bytes;
  const char* src = operand.src + head * operand.src_head_stride + offset;
  char* dst = operand.dst + head * operand.dst_head_stride + offset;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * rows_per_pass * kRowsPerThread + row_in_pass;
  const int64_t end = row_in_pass < rows_per_pass && lane < k_vectors + v_vectors ? p.rows : 0;

  pdl_wait();
  Vec<Word, kWordsPerVec> data[kRowsPerThread];
  int32_t batch[kRowsPerThread], position[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = first + i * rows_per_pass;
    batch[i] = -1;
    position[i] = 0;
    if (row < end) {
      batch[i] = p.batch_indices[row];
      position[i] = p.positions[row];
      data[i] = load<Word, kWordsPerVec>(reinterpret_cast<const Word*>(src + row * operand.src_row_stride));
    }
  }
  pdl_launch_dependents();
  // Each loop issues the loads of all rows without a branch, so their latencies overlap.
  int32_t page[kRowsPerThread], slot[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) page[i] = p.kv_indptr[max(batch[i], 0)];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const uint32_t t = position[i], pages = divide(t, p.page_size);
    slot[i] = t - pages * p.page_size.value;
    if (batch[i] >= 0) page[i] = p.kv_indices[static_cast<int64_t>(page[i]) + pages];
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i)
    if (batch[i] >= 0 && static_cast<uint32_t>(page[i]) <= p.last_page)
      store(reinterpret_cast<Word*>(dst + page[i] * operand.dst_page_stride + slot[i] * operand.dst_slot_stride),
            data[i]);
}

}  // namespace fi
