// Checks of the contents of index tensors, before any of them becomes an address. Host entries call them where
// Kernel::checks_contents: on the CPU unless FI_CHECK=0, on CUDA, where they wait for the stream, with FI_CHECK=1.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "fi/host/kernel.h"

namespace fi {

// The elements of a contiguous tensor of integers, or the first `count` of them; of CUDA a copy.
class Integers {
 public:
  Integers(const Kernel& kernel, const Tensor& t) : Integers(kernel, t, t.numel()) {}
  Integers(const Kernel& kernel, const Tensor& t, int64_t count)
      : name_(t.name()), data_(t.data()), size_(count), is_wide_(t.dtype().bits == 64) {
#if FI_CUDA
    copy_.resize(static_cast<size_t>(count * t.dtype().bytes()));
    if (!copy_.empty()) copy_from(kernel.stream(t.device()), t.device());
    data_ = copy_.data();
#else
    (void)kernel;
#endif
  }
  Integers(const Integers&) = delete;
  Integers& operator=(const Integers&) = delete;

  const char* name() const { return name_; }
  int64_t size() const { return size_; }
  int64_t operator[](int64_t i) const {
    return is_wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }

 private:
  const char* name_;
  const void* data_;
  int64_t size_;
  bool is_wide_;
#if FI_CUDA
  std::vector<char> copy_;

  void copy_from(cu::Stream stream, DLDevice device) {
    cu::DeviceGuard guard(device.device_id);
    const cu::Driver& driver = cu::Driver::get();
    const auto address = static_cast<cu::DevicePointer>(reinterpret_cast<uintptr_t>(data_));
    driver.check(driver.MemcpyDtoHAsync(copy_.data(), address, copy_.size(), stream), "cuMemcpyDtoHAsync");
    driver.check(driver.StreamSynchronize(stream), "cuStreamSynchronize");
  }
#endif
};

// Raises unless the offsets start at 0 or more, do not decrease and end at `most` or less.
inline void check_offsets(const Integers& offsets, int64_t most) {
  int64_t before = 0;
  for (int64_t i = 0; i < offsets.size(); before = offsets[i++])
    FI_CHECK(offsets[i] >= before, ValueError, "%s must not decrease and must start at 0 or more; got %lld at %lld",
             offsets.name(), static_cast<long long>(offsets[i]), static_cast<long long>(i));
  FI_CHECK(before <= most, ValueError, "%s must end at %lld or less; got %lld", offsets.name(),
           static_cast<long long>(most), static_cast<long long>(before));
}

// Raises unless the last page of each request that has pages holds 1 to page_size tokens.
inline void check_last_page_len(const Integers& offsets, const Integers& last_page_len, int64_t page_size) {
  for (int64_t b = 0; b < last_page_len.size(); ++b)
    FI_CHECK(offsets[b + 1] == offsets[b] || (last_page_len[b] >= 1 && last_page_len[b] <= page_size), ValueError,
             "%s must be in 1..%lld, the page size, of a request with pages; got %lld at %lld", last_page_len.name(),
             static_cast<long long>(page_size), static_cast<long long>(last_page_len[b]), static_cast<long long>(b));
}

// Raises unless entries [begin, end) of the page table exist and name pages of the cache.
inline void check_pages(const Integers& table, int64_t begin, int64_t end, int64_t pages, int64_t request) {
  FI_CHECK(begin >= 0 && end <= table.size(), ValueError,
           "%s, the page table, must have entries %lld to %lld for the tokens of request %lld; got %lld entries",
           table.name(), static_cast<long long>(begin), static_cast<long long>(end), static_cast<long long>(request),
           static_cast<long long>(table.size()));
  for (int64_t i = begin; i < end; ++i)
    FI_CHECK(table[i] >= 0 && table[i] < pages, ValueError,
             "%s, the page table, must name pages of the cache, 0 to %lld; got %lld at %lld, of request %lld",
             table.name(), static_cast<long long>(pages - 1), static_cast<long long>(table[i]),
             static_cast<long long>(i), static_cast<long long>(request));
}

// The last page of a cache [pages, ...]. Kernels compare page ids with it, so that no id makes an address outside.
inline uint32_t last_page(const Tensor& cache) {
  return static_cast<uint32_t>(std::min<int64_t>(std::max<int64_t>(cache.size(0), 1) - 1, INT32_MAX));
}

// Raises unless each row with batch_indices[i] >= 0 has a place in a page of its request: entry positions[i] /
// page_size of those from kv_indptr[b] to kv_indptr[b + 1].
inline void check_append(const Kernel& kernel, const Tensor& batch_indices, const Tensor& positions,
                         const Tensor& kv_indices, const Tensor& kv_indptr, int64_t pages, int64_t page_size) {
  const Integers batch(kernel, batch_indices), position(kernel, positions), table(kernel, kv_indices),
      offsets(kernel, kv_indptr);
  check_offsets(offsets, table.size());
  for (int64_t i = 0; i < batch.size(); ++i) {
    const int64_t b = batch[i], t = position[i];
    if (b < 0) continue;
    FI_CHECK(b < offsets.size() - 1, ValueError, "%s must be below %lld, the requests of %s; got %lld at %lld",
             batch.name(), static_cast<long long>(offsets.size() - 1), offsets.name(), static_cast<long long>(b),
             static_cast<long long>(i));
    const int64_t own = offsets[b + 1] - offsets[b];
    FI_CHECK(t >= 0 && t / page_size < own, ValueError,
             "%s must be in the %lld pages of %lld tokens of request %lld; got %lld at %lld", position.name(),
             static_cast<long long>(own), static_cast<long long>(page_size), static_cast<long long>(b),
             static_cast<long long>(t), static_cast<long long>(i));
    const int64_t at = offsets[b] + t / page_size;
    check_pages(table, at, at + 1, pages, b);
  }
}

}  // namespace fi
