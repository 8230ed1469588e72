// All-to-all over the GPUs of a host by bulk copies: one thread of a CTA sends chunks through shared memory and raises
// a flag for each, another copies the chunks that arrive from the workspace.
#pragma once
#include "fi/comm/all_to_all.h"
#include "fi/comm/exchange.cuh"
#include "fi/cuda/ptx/bulk_sm90.cuh"

namespace fi {

constexpr int kAllToAllStages = 4;  // of each direction: half of AllToAllConfig's

// Chunks that move through the shared memory of a CTA, by one thread.
struct ChunkRing {
  unsigned char* stages;
  Barrier* loaded;
  int32_t stage_bytes;

  FI_DEVICE void load(int step, const char* from, unsigned bytes) {
    Barrier& barrier = loaded[step % kAllToAllStages];
    barrier.arrive_expect(bytes);
    bulk_load(stages + step % kAllToAllStages * stage_bytes, from, bytes, barrier);
  }
  // In a group of its own.
  FI_DEVICE void store(int step, char* to, unsigned bytes) {
    loaded[step % kAllToAllStages].wait(step / kAllToAllStages & 1);
    bulk_store(to, stages + step % kAllToAllStages * stage_bytes, bytes);
    bulk_commit();
  }
};

FI_DEVICE void all_to_all(const AllToAllParams& p) {
  extern __shared__ __align__(128) unsigned char chunks_shared[];  // [2, kAllToAllStages, chunk_bytes]
  __shared__ Barrier loaded[2 * kAllToAllStages];
  const CommParams& c = p.comm;
  const int stride = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  if (threadIdx.x == 0)
    for (Barrier& barrier : loaded) barrier.init(1);
  fence_barrier_init();
  __syncthreads();
  pdl_wait();
  Exchange exchange(c);
  const auto bytes_of = [&](int chunk) {
    const int64_t left = p.now - static_cast<int64_t>(chunk) * p.chunk_bytes;
    return static_cast<unsigned>(left < p.chunk_bytes ? left : p.chunk_bytes);
  };
  if (blockIdx.x == 0) exchange.announce();
  if (threadIdx.x == 0) {
    // Work item i: chunk i % chunks for the rank behind this one by i / chunks + 1; the last row is this rank's own.
    ChunkRing ring{chunks_shared, loaded, p.chunk_bytes};
    const int items = c.world * p.chunks;
    const auto peer_of = [&](int item) { return (c.rank + 1 + item / p.chunks) % c.world; };
    const auto load = [&](int step) {
      const int item = first + step * stride;
      if (item >= items) return;
      const int chunk = item % p.chunks;
      ring.load(step, p.input + peer_of(item) * p.input_stride + p.first + static_cast<int64_t>(chunk) * p.chunk_bytes,
                bytes_of(chunk));
    };
    const auto send = [&](int step) {
      const int item = first + step * stride, chunk = item % p.chunks, peer = peer_of(item);
      const int64_t offset = static_cast<int64_t>(chunk) * p.chunk_bytes;
      char* to = peer == c.rank
                     ? p.out + c.rank * p.bytes + p.first + offset
                     : p.bulk.data(c, peer, exchange.epoch) + inbox_of(c.rank, peer, c.world) * p.now + offset;
      if (exchange.failed && peer != c.rank) {
        bulk_commit();
        ring.loaded[step % kAllToAllStages].wait(step / kAllToAllStages & 1);
      } else {
        ring.store(step, to, bytes_of(chunk));
      }
    };
    const auto raise_flag = [&](int step) {
      const int item = first + step * stride, peer = peer_of(item);
      if (step < 0 || item >= items || peer == c.rank || exchange.failed) return;
      fence_async();  // order: writer: copies have stored what the flag announces
      store_flag(p.bulk.flag(c, peer, exchange.epoch, inbox_of(c.rank, peer, c.world), item % p.chunks),
                 exchange.epoch + 1);
    };
    load(0);
    load(1);
    int step = 0;
    for (; first + step * stride < items; ++step) {
      send(step);
      bulk_wait<1>();
      raise_flag(step - 1);
      load(step + 2);  // its stage was stored two steps ago
    }
    bulk_wait<0>();
    raise_flag(step - 1);
  } else if (threadIdx.x == 32) {
    ChunkRing ring{chunks_shared + kAllToAllStages * p.chunk_bytes, loaded + kAllToAllStages, p.chunk_bytes};
    const int items = (c.world - 1) * p.chunks;
    // Rank j sends to this rank at its work item of the same number.
    const auto source_of = [&](int item) { return (c.rank - 1 - item / p.chunks + 2 * c.world) % c.world; };
    const auto receive = [&](int step) {
      const int item = first + step * stride;
      if (item >= items || exchange.failed) return;
      const int chunk = item % p.chunks, source = source_of(item), inbox = inbox_of(source, c.rank, c.world);
      const uint32_t* flag = p.bulk.flag(c, c.rank, exchange.epoch, inbox, chunk);
      PollLimit limit;
      while (load_flag(flag) != exchange.epoch + 1)
        if (!limit.allows(c, exchange.rotation(), source)) {
          exchange.failed = true;
          return;
        }
      fence_async();  // order: waiter: a copy reads what the flag announces
      ring.load(step,
                p.bulk.data(c, c.rank, exchange.epoch) + inbox * p.now + static_cast<int64_t>(chunk) * p.chunk_bytes,
                bytes_of(chunk));
    };
    const auto store = [&](int step) {
      const int item = first + step * stride;
      if (step < 0 || item >= items || exchange.failed) return;
      const int chunk = item % p.chunks;
      ring.store(step, p.out + source_of(item) * p.bytes + p.first + static_cast<int64_t>(chunk) * p.chunk_bytes,
                 bytes_of(chunk));
    };
    int step = 0;
    for (; first + step * stride < items && !exchange.failed; ++step) {
      bulk_wait_read<2>();  // the stage was stored four steps ago
      receive(step);
      store(step - 1);
    }
    store(step - 1);
    bulk_wait<0>();
  }
  __syncthreads();
  Emptier(exchange).rest();
  if (blockIdx.x == 0) exchange.compare();
  exchange.finish(0);
}

}  // namespace fi
