// The check of the lengths of requests that a plan is given beside their pages.
#pragma once
#include "fi/host/contents.h"
#include "fi/host/op.h"

namespace fi {

// Raises unless each request has 0 tokens or more, and no more than its pages hold: a plan would leave out the others.
// INT32_MAX means all of them. offsets: those of pages; absent: each request has pages_per_request.
inline void check_kv_len(const Kernel& kernel, const Tensor& kv_len, const OptionalTensor& offsets,
                         int64_t pages_per_request, int64_t page_size) {
  const Integers lengths(kernel, kv_len), pages(kernel, offsets ? Tensor(offsets) : kv_len);
  const bool is_signed = kv_len.dtype() != kU32;
  for (int64_t b = 0; b < lengths.size(); ++b) {
    const int64_t most = (offsets ? pages[b + 1] - pages[b] : pages_per_request) * page_size;
    const int64_t length = is_signed ? lengths[b] : static_cast<uint32_t>(lengths[b]);
    FI_CHECK(length == INT32_MAX || (length >= 0 && length <= most), ValueError,
             "%s must be in 0..%lld, the tokens of its pages, of request %lld; got %lld", lengths.name(),
             static_cast<long long>(most), static_cast<long long>(b), static_cast<long long>(length));
  }
}

}  // namespace fi
