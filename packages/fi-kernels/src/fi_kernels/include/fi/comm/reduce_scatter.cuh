// Reduce-scatter over the GPUs of a host, with a residual, RMSNorm and quantization: rank r adds the r-th slice of the
// rows of all ranks, in their order, in fp32, and rounds once.
#pragma once
#include "fi/comm/all_reduce.cuh"

namespace fi {

// One hop: every rank sends each slice to its owner. The rows, and all outputs, are of a slice; p.slice lies between
// the slices of the input.
template <class T, int kOutput, int kWorld, int kVecs>
FI_DEVICE void reduce_scatter(const AllReduceParams& p) {
  __shared__ float warp_sums[32];
  const CommParams& c = p.comm;
  const int stride = static_cast<int>(gridDim.x);
  pdl_wait();
  Exchange exchange(c);
  uint4 w[kVecs];
  load_weight<kOutput>(p, w);
  const auto slice = [&](int rank) { return static_cast<const uint4*>(p.input) + rank * p.slice; };
  const auto send = [&](int row) {
    if (row >= p.rows || exchange.failed) return;
    const RowVectors<kVecs> vectors(p, row);
#pragma unroll
    for (int shift = 1; shift < kWorld; ++shift) {
      if (shift >= c.world) continue;
      const int peer = (c.rank + shift) % c.world;
      uint4 x[kVecs];
      vectors.load(slice(peer), x);
      remove_empty_words(x);
      vectors.send(exchange.data(peer) + inbox_of(c.rank, peer, c.world) * p.total + vectors.first, x);
    }
  };
  int row = static_cast<int>(blockIdx.x);
  send(row);
  if (blockIdx.x == 0) exchange.announce();
  Emptier emptier(exchange);
  if (p.early_trigger) pdl_launch_dependents();
  for (; row < p.rows; row += stride) {
    send(row + stride);
    emptier.some(kVecs * (kWorld - 1));
    const RowVectors<kVecs> vectors(p, row);
    uint4 x[kVecs], residual[kVecs], s[kVecs];
    vectors.load(slice(c.rank), x);
    remove_empty_words(x);
    if constexpr (kOutput != kReduceSum) vectors.load(p.residual_in, residual);
    float sum[kVecs][ReducedRow<T>::kVec];
    receive_sum<T, kWorld>(exchange, vectors, exchange.data(c.rank) + vectors.first, p.total, x, sum);
    round_sum<T, kOutput>(sum, residual, s);
    ReducedRow<T>::template store<kOutput>(p, row, s, w, warp_sums);
  }
  emptier.rest();
  if (blockIdx.x == 0) exchange.compare();
  exchange.finish(static_cast<uint32_t>(p.used));
}

}  // namespace fi
