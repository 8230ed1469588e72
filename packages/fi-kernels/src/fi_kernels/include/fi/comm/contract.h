// The arguments that every collective has: checks of the workspace, the parameters of a call, a failed call's text.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "fi/comm/workspace.h"
#include "fi/host/tensor.h"

namespace fi {

inline void check_status(const Tensor& status) {
  const volatile CommStatus& s = *status.data<CommStatus>();
  if (s.error == kCommOk) return;
  if (s.error == kCommMismatch)
    raise("RuntimeError",
          "workspace: rank %u called another collective, or with another shape, dtype or pattern (%08x here, %08x "
          "there); destroy the workspace on every rank and create it again",
          s.rank, s.own_call, s.other_call);
  raise("RuntimeError",
        "workspace: rank %u did not send its data in time; it has ended, or makes fewer calls than this rank. Destroy "
        "the workspace on every rank and create it again",
        s.rank);
}

// What ranks compare: a hash of what must be equal on all of them (FNV-1a).
inline uint32_t call_of(std::initializer_list<int64_t> values) {
  uint32_t hash = 2166136261u;
  for (int64_t value : values)
    for (int i = 0; i < 8; ++i, value >>= 8) hash = (hash ^ static_cast<uint32_t>(value & 0xff)) * 16777619u;
  return hash & ~kEmpty;
}

// Raises if an earlier call has failed. Args is the op's; input gives the device.
template <class Args>
CommParams comm_params(const Args& a, const Tensor& input, uint32_t call) {
  Dim bytes{"bytes"}, world{"world"};
  a.workspace.is({kU8}).on(input).contiguous().shape(bytes);
  a.peers.is({kI64}).contiguous().shape(world);
  a.status.is({kI32}).contiguous();
  FI_CHECK(a.peers.device().device_type == kDLCPU && world >= 1 && world <= kMaxWorld, ValueError,
           "peers must have 1 to %d addresses on the cpu; got %s on %s", kMaxWorld, a.peers.shape_str().c_str(),
           a.peers.device_str().c_str());
  FI_CHECK(a.status.numel() * 4 >= static_cast<int64_t>(sizeof(CommStatus)), ValueError,
           "status must have 4 elements; got %s", a.status.shape_str().c_str());
  FI_CHECK(a.rank >= 0 && a.rank < world, ValueError, "rank must be in 0..%lld; got %lld",
           static_cast<long long>(world - 1), static_cast<long long>(a.rank));
  FI_CHECK(a.timeout_ms > 0, ValueError, "timeout_ms must be positive; got %lld", static_cast<long long>(a.timeout_ms));
  FI_CHECK(bytes >= kCommHeader && a.rotation_bytes > 0 && a.rotation_bytes % 16 == 0 &&
               a.rotation_bytes <= (bytes - kCommHeader) / kRotations,
           ValueError, "rotation_bytes must be a multiple of 16 and fit %d times in workspace, %lld bytes; got %lld",
           kRotations, static_cast<long long>(bytes), static_cast<long long>(a.rotation_bytes));
  check_status(a.status);
  CommParams p{};
  for (int64_t i = 0; i < world; ++i) p.peers[i] = reinterpret_cast<char*>(a.peers.template data<int64_t>()[i]);
  p.peers[a.rank] = a.workspace.template data<char>();
  p.status = a.status.template data<CommStatus>();
  p.rotation_bytes = a.rotation_bytes;
  p.timeout_ns = static_cast<uint64_t>(a.timeout_ms) * 1000000;
  p.call = call;
  p.rank = static_cast<int32_t>(a.rank);
  p.world = static_cast<int32_t>(world);
  return p;
}

// The memory of a workspace for bulk copies, behind its rotations.
template <class Args>
BulkMemory bulk_memory(const Args& a) {
  const int64_t bytes = a.workspace.size(0), rows = 2 * (a.peers.size(0) - 1);
  BulkMemory m{};
  m.flag_offset = kCommHeader + kRotations * a.rotation_bytes;
  FI_CHECK(a.max_flags >= 0 && a.max_flags % 4 == 0 && a.max_flags <= bytes &&
               m.flag_offset + rows * a.max_flags * 4 <= bytes,
           ValueError, "max_flags must be a multiple of 4 and fit workspace, %lld bytes; got %lld",
           static_cast<long long>(bytes), static_cast<long long>(a.max_flags));
  m.data_offset = m.flag_offset + rows * a.max_flags * 4;
  m.data_bytes = (bytes - m.data_offset) / 2 / 16 * 16;
  m.max_flags = static_cast<int32_t>(a.max_flags);
  return m;
}

}  // namespace fi
