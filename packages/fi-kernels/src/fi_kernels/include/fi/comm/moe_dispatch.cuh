// Sends tokens to the ranks of their experts over the GPUs of a host.
#pragma once
#include "fi/comm/exchange.cuh"
#include "fi/comm/moe_dispatch.h"

namespace fi {

// The ranks that have an expert of a token, a bit each.
FI_DEVICE uint32_t targets_of(const MoeDispatchParams& p, int token) {
  uint32_t targets = 0;
  for (int k = 0; k < p.top_k; ++k) {
    const int expert = p.experts[static_cast<int64_t>(token) * p.top_k + k];
    if (expert >= 0 && expert < p.num_experts) targets |= 1u << (expert / p.experts_per_rank);
  }
  return targets;
}

// Copies a row of a payload to its row at each rank, -1: none.
template <class Word>
FI_DEVICE void send_row(const MoeDispatchParams& p, const MoeDispatchParams::Payload& payload, int token,
                        const int32_t* rows, int lane, int lanes) {
  const auto* from = reinterpret_cast<const Word*>(payload.from + static_cast<int64_t>(token) * payload.bytes);
  const int words = payload.bytes / static_cast<int>(sizeof(Word));
  for (int i = lane; i < words; i += lanes) {
    const Word x = from[i];
#pragma unroll
    for (int r = 0; r < kMaxWorld; ++r) {
      const int row = rows[r];
      char* to =
          p.comm.peers[r] + payload.offset + (static_cast<int64_t>(p.comm.rank) * p.max_tokens + row) * payload.bytes;
      if (row >= 0) reinterpret_cast<Word*>(to)[i] = x;
    }
  }
}

// 256 threads. A CTA sends neighbouring tokens; the CTA that is ready last tells the other ranks, and waits for them.
FI_DEVICE void moe_dispatch(const MoeDispatchParams& p) {
  __shared__ int32_t base[kMaxWorld];            // tokens of earlier CTAs, by target
  __shared__ int32_t row_shared[64][kMaxWorld];  // of 64 tokens at a time
  __shared__ bool is_last;
  const CommParams& c = p.comm;
  const int first = static_cast<int>(blockIdx.x) * p.tokens_per_cta;
  const int end = min(first + p.tokens_per_cta, p.tokens);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x < kMaxWorld) base[threadIdx.x] = 0;
  __syncthreads();
  pdl_wait();
  Exchange exchange(c);
  if (blockIdx.x == 0) exchange.announce();
  for (int start = 0; start < first; start += static_cast<int>(blockDim.x)) {
    const int token = start + static_cast<int>(threadIdx.x);
    const uint32_t targets = token < first ? targets_of(p, token) : 0;
    for (int r = 0; r < c.world; ++r) {
      const uint32_t found = __ballot_sync(~0u, targets >> r & 1);
      if (lane == 0 && found) atomicAdd(&base[r], __popc(found));
    }
  }
  __syncthreads();
  MoeControl* own = moe_control(c, c.rank, p.control_offset);
  int32_t before = threadIdx.x < kMaxWorld ? base[threadIdx.x] : 0;
  for (int start = first; start < end; start += 64) {
    if (threadIdx.x < 32)
      for (int half = 0; half < 64; half += 32) {
        const int token = start + half + lane;
        const uint32_t targets = token < end ? targets_of(p, token) : 0;
        for (int r = 0; r < kMaxWorld; ++r) {
          const uint32_t found = __ballot_sync(~0u, targets >> r & 1);
          const int row = base[r] + __popc(found & ((1u << lane) - 1));
          const bool fits = (targets >> r & 1) && row < p.max_tokens;
          row_shared[half + lane][r] = fits ? row : -1;
          if (token < end) p.rows[static_cast<int64_t>(token) * kMaxWorld + r] = fits ? row : -1;
          __syncwarp();
          if (lane == 0) base[r] += __popc(found);
          __syncwarp();
        }
      }
    __syncthreads();
    const int now = min(64, end - start);
    const int lanes = now >= 8 ? 32 : now >= 4 ? 64 : now >= 2 ? 128 : 256;
    const int groups = static_cast<int>(blockDim.x) / lanes;
    for (int i = static_cast<int>(threadIdx.x) / lanes; i < now && !exchange.failed; i += groups)
      for (int j = 0; j < p.num_payloads; ++j) {
        const auto& payload = p.payloads[j];
        const int at = static_cast<int>(threadIdx.x) % lanes;
        if (payload.unit == 16)
          send_row<uint4>(p, payload, start + i, row_shared[i], at, lanes);
        else if (payload.unit == 4)
          send_row<uint32_t>(p, payload, start + i, row_shared[i], at, lanes);
        else
          send_row<uint8_t>(p, payload, start + i, row_shared[i], at, lanes);
      }
    __syncthreads();
  }
  if (threadIdx.x < c.world) {
    const int32_t sent = min(base[threadIdx.x], p.max_tokens) - min(before, p.max_tokens);
    if (sent) atomicAdd(&own->totals[threadIdx.x], static_cast<uint32_t>(sent));
  }
  __threadfence_system();  // order: writer: every thread's rows, before the count of CTAs
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto ready = static_cast<uint32_t>(count_device(reinterpret_cast<int*>(&own->arrived)));
    is_last = (ready & ~kEmpty) == gridDim.x - 1;
    __threadfence_system();  // order: waiter: what other CTAs have counted, before the flags of this one
  }
  __syncthreads();
  const int rank = static_cast<int>(threadIdx.x);
  if (is_last && rank < c.world) {
    const uint32_t total = load_system_word(&own->totals[rank]) & ~kEmpty;
    own->totals[rank] = 0;
    if (rank == 0) own->arrived = 0;
    uint32_t received = total;
    if (rank != c.rank) {
      MoeControl* peer = moe_control(c, rank, p.control_offset);
      if (!exchange.failed) {
        store_system_word(&peer->counts[c.rank], total);
        store_flag(&peer->dispatched[c.rank], exchange.epoch + 1);
      }
      PollLimit limit;
      while (!exchange.failed && load_flag(&own->dispatched[rank]) != exchange.epoch + 1)
        exchange.failed = !limit.allows(c, exchange.rotation(), rank);
      received = exchange.failed ? 0 : load_system_word(&own->counts[rank]);
    }
    p.counts[rank] = static_cast<int32_t>(received);
  }
  if (blockIdx.x == 0) exchange.compare();
  exchange.finish(0);
}

}  // namespace fi
