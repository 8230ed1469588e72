// All-to-all over the GPUs of a host on sm_80 and later: all threads of a CTA write a chunk to the workspace of its
// rank and raise its flag, then copy a chunk that has arrived.
#pragma once
#include "fi/comm/all_to_all.h"
#include "fi/comm/exchange.cuh"

namespace fi {

// Copies 16 bytes at a time, four in flight; load and store are of one vector.
template <class Load, class Store>
FI_DEVICE void copy_vectors(const char* from, char* to, int64_t bytes, Load load, Store store) {
  const int vectors = static_cast<int>(bytes / 16), step = static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += 4 * step) {
    uint4 x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (i + k * step < vectors) x[k] = load(reinterpret_cast<const uint4*>(from) + i + k * step);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (i + k * step < vectors) store(reinterpret_cast<uint4*>(to) + i + k * step, x[k]);
  }
}

FI_DEVICE void all_to_all_by_threads(const AllToAllParams& p) {
  const CommParams& c = p.comm;
  const int stride = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  const int items = c.world * p.chunks;
  pdl_wait();
  Exchange exchange(c);
  if (blockIdx.x == 0) exchange.announce();
  const auto bytes_of = [&](int chunk) {
    const int64_t left = p.now - static_cast<int64_t>(chunk) * p.chunk_bytes;
    return left < p.chunk_bytes ? left : p.chunk_bytes;
  };
  const auto load_input = [](const uint4* from) { return *from; };
  const auto store_output = [](uint4* to, const uint4& x) { store_global(to, x); };
  // Work items as in all_to_all_sm90.cuh: chunk i % chunks for the rank behind this one by i / chunks + 1.
  const auto send = [&](int item) {
    if (item >= items) return;
    const int chunk = item % p.chunks, peer = (c.rank + 1 + item / p.chunks) % c.world;
    const int64_t offset = static_cast<int64_t>(chunk) * p.chunk_bytes;
    const char* from = p.input + peer * p.input_stride + p.first + offset;
    if (peer == c.rank) {
      copy_vectors(from, p.out + peer * p.bytes + p.first + offset, bytes_of(chunk), load_input, store_output);
      return;
    }
    const int inbox = inbox_of(c.rank, peer, c.world);
    if (!exchange.failed)
      copy_vectors(from, p.bulk.data(c, peer, exchange.epoch) + inbox * p.now + offset, bytes_of(chunk), load_input,
                   [](uint4* to, const uint4& x) { store_system(to, x); });
    __syncthreads();
    if (threadIdx.x == 0 && !exchange.failed)
      store_flag(p.bulk.flag(c, peer, exchange.epoch, inbox, chunk), exchange.epoch + 1);
  };
  const auto receive = [&](int item) {
    if (item < 0 || item >= items - p.chunks) return;
    const int chunk = item % p.chunks, source = (c.rank - 1 - item / p.chunks + 2 * c.world) % c.world;
    const int inbox = inbox_of(source, c.rank, c.world);
    bool failed = exchange.failed;
    if (threadIdx.x == 0) {
      const uint32_t* flag = p.bulk.flag(c, c.rank, exchange.epoch, inbox, chunk);
      PollLimit limit;
      while (!failed && load_flag(flag) != exchange.epoch + 1) failed = !limit.allows(c, exchange.rotation(), source);
    }
    exchange.failed = __syncthreads_or(failed);
    if (exchange.failed) return;
    const int64_t offset = static_cast<int64_t>(chunk) * p.chunk_bytes;
    copy_vectors(
        p.bulk.data(c, c.rank, exchange.epoch) + inbox * p.now + offset, p.out + source * p.bytes + p.first + offset,
        bytes_of(chunk), [](const uint4* from) { return load_system(from); }, store_output);
  };
  // One chunk ahead: what this CTA receives does not wait for what it sends.
  send(first);
  for (int item = first; item < items; item += stride) {
    send(item + stride);
    receive(item);
  }
  Emptier(exchange).rest();
  if (blockIdx.x == 0) exchange.compare();
  exchange.finish(0);
}

}  // namespace fi
