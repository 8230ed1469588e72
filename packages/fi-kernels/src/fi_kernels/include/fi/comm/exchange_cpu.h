// How ranks on CPUs exchange data: processes that share memory publish it, and wait for each other.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "fi/comm/workspace.h"
#include "fi/host/error.h"

namespace fi::cpu {

// The start of a rank's workspace. Two rotations do: a rank publishes call n + 2 where call n was, and by then every
// rank has published call n + 1, so it has read call n.
struct CommHeader {
  std::atomic<uint32_t> published;  // number of calls whose data can be read
  uint32_t calls[2];                // what they are
};
static_assert(sizeof(CommHeader) <= kCommHeader && std::atomic<uint32_t>::is_always_lock_free, "shared by processes");

inline CommHeader* comm_header(const CommParams& p, int32_t rank) {
  return reinterpret_cast<CommHeader*>(p.peers[rank]);
}

inline void fail(const CommParams& p, CommError error, int32_t rank, uint32_t other) {
  *p.status = {error, static_cast<uint32_t>(rank), p.call, other};
}

// Publishes `rows` times `bytes` bytes of this rank, which lie `stride` bytes apart, and waits for those of all others;
// returns whether they came. Raises if a rotation has no room for them.
inline bool publish(const CommParams& p, const void* data, int64_t bytes, int64_t rows = 1, int64_t stride = 0) {
  FI_CHECK(rows * bytes <= p.rotation_bytes, ValueError,
           "workspace is too small: a rotation must have %lld bytes; got %lld", static_cast<long long>(rows * bytes),
           static_cast<long long>(p.rotation_bytes));
  CommHeader* own = comm_header(p, p.rank);
  const uint32_t call = own->published.load(std::memory_order_relaxed);
  char* to = p.peers[p.rank] + kCommHeader + call % 2 * p.rotation_bytes;
  for (int64_t row = 0; row < rows; ++row)
    memcpy(to + row * bytes, static_cast<const char*>(data) + row * stride, static_cast<size_t>(bytes));
  own->calls[call % 2] = p.call;
  own->published.store(call + 1, std::memory_order_release);
  const auto start = std::chrono::steady_clock::now();
  for (int32_t rank = 0; rank < p.world; ++rank) {
    CommHeader* other = comm_header(p, rank);
    while (static_cast<int32_t>(other->published.load(std::memory_order_acquire) - call) <= 0) {
      sched_yield();
      const auto waited = std::chrono::steady_clock::now() - start;
      if (static_cast<uint64_t>(std::chrono::nanoseconds(waited).count()) < p.timeout_ns) continue;
      fail(p, kCommTimeout, rank, 0);
      return false;
    }
    if (other->calls[call % 2] == p.call) continue;
    fail(p, kCommMismatch, rank, other->calls[call % 2]);
    return false;
  }
  return true;
}
// The data of a rank, after publish.
inline const char* published_data(const CommParams& p, int32_t rank) {
  const uint32_t call = comm_header(p, p.rank)->published.load(std::memory_order_relaxed) - 1;
  return p.peers[rank] + kCommHeader + call % 2 * p.rotation_bytes;
}

}  // namespace fi::cpu
