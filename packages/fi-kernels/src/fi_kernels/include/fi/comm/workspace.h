// The memory that the ranks of a group share: its layout, and what a rank keeps about its calls.
#pragma once
#include "fi/types.h"

namespace fi {

constexpr int32_t kMaxWorld = 8;
constexpr uint32_t kEmpty = 0x80000000u;  // a word that has not arrived; data never contain it (-0 becomes 0)
constexpr int32_t kRotations = 3;
constexpr uint32_t kEpochs = 0x7ffffffeu;  // a multiple of 6, so that rotations go on; flags never become kEmpty

// The start of a rank's workspace. A call uses rotation epoch % 3 and empties the one of the call before it.
//
// Why three: a rank that has received all data of call n knows that every rank has finished call n - 1. It may then
// begin call n + 1 and write to that rotation of a rank that is still in call n, so call n empties neither its own
// rotation nor the next, but the previous one; that is written next in call n + 2, by ranks which have received data
// of call n + 1 from the rank that emptied it.
//
// Every word of a new workspace is kEmpty, so the upper bit of the counters is ignored.
struct CommState {
  uint32_t epoch;     // number of calls, modulo kEpochs
  uint32_t used;      // vectors of 16 bytes that the previous call wrote to this workspace
  uint32_t error;     // kEmpty, or a CommError once a call has failed; every later call fails at once
  uint32_t finished;  // CTAs of the current call
  uint32_t padding[60];
  uint32_t calls[kRotations][kMaxWorld];  // what each rank calls: ranks compare it
};
constexpr int64_t kCommHeader = 4096;  // bytes before the data
static_assert(sizeof(CommState) <= kCommHeader, "the state does not fit");

enum CommError : uint32_t { kCommOk = 0, kCommTimeout = 1, kCommMismatch = 2 };

// In host memory: what the first failure was. A later call raises it.
struct CommStatus {
  uint32_t error, rank, own_call, other_call;
};

struct CommParams {
  char* peers[kMaxWorld];  // workspace of each rank, at the address where this process maps it
  CommStatus* status;
  int64_t rotation_bytes;
  uint64_t timeout_ns;
  uint32_t call;  // of this call, equal on all ranks; not kEmpty
  int32_t rank, world;
};

// Behind the rotations: memory for bulk copies, which carry no flags of their own. A chunk has arrived when its flag is
// the number of the call plus 1. Nothing is emptied, and two rotations suffice, of the flags too: a rank that has its
// data of call n may begin call n + 1 before the others have seen all flags of call n.
struct BulkMemory {
  int64_t data_offset, data_bytes;  // of a rotation
  int64_t flag_offset;
  int32_t max_flags;  // of an inbox

  FI_HOST_DEVICE char* data(const CommParams& p, int32_t rank, uint32_t epoch) const {
    return p.peers[rank] + data_offset + epoch % 2 * data_bytes;
  }
  FI_HOST_DEVICE uint32_t* flag(const CommParams& p, int32_t rank, uint32_t epoch, int32_t inbox, int32_t chunk) const {
    const int64_t row = static_cast<int64_t>(epoch % 2) * (p.world - 1) + inbox;
    return reinterpret_cast<uint32_t*>(p.peers[rank] + flag_offset) + row * max_flags + chunk;
  }
};

// The inbox of a rank for data of `source`: 0 to world - 2.
FI_HOST_DEVICE int32_t inbox_of(int32_t source, int32_t rank, int32_t world) {
  return (source - rank - 1 + world) % world;
}

}  // namespace fi
