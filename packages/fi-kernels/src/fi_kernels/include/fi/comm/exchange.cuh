// One rank's side of an exchange by data that carry their own flag: words of 4 bytes arrive when they are not kEmpty.
#pragma once
#include "fi/comm/workspace.h"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/system.cuh"

namespace fi {

// As sent: no word is kEmpty. Of two 16-bit values that is (0, -0), which becomes (0, 0).
FI_DEVICE uint4 without_empty_words(uint4 x) {
  x.x = x.x == kEmpty ? 0 : x.x;
  x.y = x.y == kEmpty ? 0 : x.y;
  x.z = x.z == kEmpty ? 0 : x.z;
  x.w = x.w == kEmpty ? 0 : x.w;
  return x;
}
FI_DEVICE bool arrived(const uint4& x) { return x.x != kEmpty && x.y != kEmpty && x.z != kEmpty && x.w != kEmpty; }

FI_DEVICE CommState* comm_state(const CommParams& p, int32_t rank) {
  return reinterpret_cast<CommState*>(p.peers[rank]);
}

// The first failure counts.
FI_DEVICE void report_failure(const CommParams& p, CommError error, int32_t rank, uint32_t other) {
  if (atomicCAS(&comm_state(p, p.rank)->error, kEmpty, error) != kEmpty) return;
  p.status->rank = static_cast<uint32_t>(rank);
  p.status->own_call = p.call;
  p.status->other_call = other;
  __threadfence_system();  // order: writer: the host sees these words before the error
  store_system_word(&p.status->error, error);
}

// How long a thread polls.
struct PollLimit {
  uint64_t since = 0;

  // Whether to poll on: not if the other rank calls something else, if any thread has failed, or if the time is over.
  FI_DEVICE bool allows(const CommParams& p, uint32_t rotation, int32_t rank) {
    const uint64_t now = nanoseconds();
    if (since == 0) since = now;
    if (now - since < 20000) return true;  // looks at nothing else in the first 20 us
    const CommState* own = comm_state(p, p.rank);
    const uint32_t other = load_system_word(&own->calls[rotation][rank]);
    if (other != kEmpty && other != p.call) {
      report_failure(p, kCommMismatch, rank, other);
      return false;
    }
    if (load_system_word(&own->error) != kEmpty) return false;
    if (now - since < p.timeout_ns) return true;
    report_failure(p, kCommTimeout, rank, 0);
    return false;
  }
};

// A call of this rank. Every thread makes one after pdl_wait().
struct Exchange {
  const CommParams& p;
  uint32_t epoch, used;
  bool failed;

  FI_DEVICE explicit Exchange(const CommParams& params) : p(params) {
    const uint4 words = load_system(comm_state(p, p.rank));
    epoch = words.x & ~kEmpty, used = words.y & ~kEmpty, failed = words.z != kEmpty;
  }
  FI_DEVICE uint32_t rotation() const { return epoch % kRotations; }
  FI_DEVICE uint32_t previous() const { return (epoch + kRotations - 1) % kRotations; }
  FI_DEVICE uint4* data(int32_t rank) const {
    return reinterpret_cast<uint4*>(p.peers[rank] + kCommHeader + rotation() * p.rotation_bytes);
  }
  FI_DEVICE uint4* previous_data() const {
    return reinterpret_cast<uint4*>(p.peers[p.rank] + kCommHeader + previous() * p.rotation_bytes);
  }

  // Tells every rank what this one calls; by the first threads of one CTA.
  FI_DEVICE void announce() const {
    const int32_t rank = static_cast<int32_t>(threadIdx.x);
    if (rank >= p.world || failed) return;
    if (rank != p.rank) store_system_word(&comm_state(p, rank)->calls[rotation()][p.rank], p.call);
    comm_state(p, p.rank)->calls[previous()][rank] = kEmpty;
  }
  // Compares what the others call; by the same threads, at the end.
  FI_DEVICE void compare() const {
    const int32_t rank = static_cast<int32_t>(threadIdx.x);
    if (rank >= p.world || rank == p.rank || failed) return;
    PollLimit limit;
    uint32_t other;
    while ((other = load_system_word(&comm_state(p, p.rank)->calls[rotation()][rank])) == kEmpty)
      if (!limit.allows(p, rotation(), rank)) return;
    if (other != p.call) report_failure(p, kCommMismatch, rank, other);
  }

  // By all threads, at the end: the last CTA prepares the next call.
  FI_DEVICE void finish(uint32_t now_used) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    CommState* own = comm_state(p, p.rank);
    const auto before = static_cast<uint32_t>(count_device(reinterpret_cast<int*>(&own->finished)));
    if ((before & ~kEmpty) != gridDim.x - 1) return;
    own->finished = 0;
    own->used = now_used;
    own->epoch = epoch + 1 == kEpochs ? 0 : epoch + 1;
  }
};

// Empties this rank's previous rotation, a part at a time, so that it takes no time of its own.
struct Emptier {
  uint4* data;
  uint32_t next, step, used;

  FI_DEVICE explicit Emptier(const Exchange& exchange)
      : data(exchange.previous_data()),
        next(blockIdx.x * blockDim.x + threadIdx.x),
        step(gridDim.x * blockDim.x),
        used(exchange.failed ? 0 : exchange.used) {}
  FI_DEVICE void some(int count) {
    for (int i = 0; i < count && next < used; ++i, next += step)
      store_global(data + next, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
  }
  FI_DEVICE void rest() { some(0x7fffffff); }
};

}  // namespace fi
