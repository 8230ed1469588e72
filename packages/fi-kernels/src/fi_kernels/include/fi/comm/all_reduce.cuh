// All-reduce over the GPUs of a host, with a residual, RMSNorm and quantization: every rank adds in the order of ranks
// in fp32 and rounds once, so all ranks have the same bits.
#pragma once
#include "fi/comm/exchange.cuh"
#include "fi/comm/reduced_row.cuh"

namespace fi {

// The vectors of a row that a thread holds.
template <int kVecs>
struct RowVectors {
  int64_t first;  // of the row in the message
  int vectors;

  FI_DEVICE RowVectors(const AllReduceParams& p, int row) : first(static_cast<int64_t>(row) * p.vectors) {
    const int64_t left = p.total - first;
    vectors = left < p.vectors ? static_cast<int>(left) : p.vectors;
  }
  FI_DEVICE int index(int k) const { return static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x); }
  FI_DEVICE bool inside(int k) const { return index(k) < vectors; }

  FI_DEVICE void load(const void* from, uint4 (&x)[kVecs]) const {
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
      x[k] = inside(k) ? static_cast<const uint4*>(from)[first + index(k)] : make_uint4(0, 0, 0, 0);
  }
  FI_DEVICE void send(uint4* to, const uint4 (&x)[kVecs]) const {
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
      if (inside(k)) store_system(to + index(k), x[k]);
  }
};

// Of the vectors of a row that a thread holds, those of the weight; of 4 vectors they are loaded when they are needed.
template <int kOutput, int kVecs>
FI_DEVICE void load_weight(const AllReduceParams& p, uint4 (&w)[kVecs]) {
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x);
    w[k] = make_uint4(0, 0, 0, 0);
    if (kOutput != kReduceSum && kVecs < 4 && i < p.vectors) w[k] = static_cast<const uint4*>(p.weight)[i];
  }
}

template <int kVecs>
FI_DEVICE void remove_empty_words(uint4 (&x)[kVecs]) {
#pragma unroll
  for (int k = 0; k < kVecs; ++k) x[k] = without_empty_words(x[k]);
}

// Polls until every vector has arrived: poll(missing) loads them all again and sets the rank of one that has not; the
// caller's vectors are NaN after a failure.
template <class Poll>
FI_DEVICE bool receive(Exchange& exchange, Poll poll) {
  PollLimit limit;
  while (!exchange.failed) {
    int missing = -1;
    poll(missing);
    if (missing < 0) return true;
    exchange.failed = !limit.allows(exchange.p, exchange.rotation(), missing);
  }
  return false;
}
FI_DEVICE uint4 either(bool first, uint4 a, uint4 b) {
  return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}
constexpr uint32_t kNanWord = 0xffffffffu;  // of two 16-bit floats or one of 32 bits

// sum = the vectors of all ranks, in their order: `own` of this one, the others' from inboxes. `base` is where the
// row starts in inbox 0, `inbox_stride` lies between inboxes.
template <class T, int kWorld, int kVecs>
FI_DEVICE void receive_sum(Exchange& exchange, const RowVectors<kVecs>& row, const uint4* base, int64_t inbox_stride,
                           const uint4 (&own)[kVecs], float (&sum)[kVecs][ReducedRow<T>::kVec]) {
  constexpr int at_once = kVecs < 8 / kWorld ? kVecs : 8 / kWorld;  // so that the loads of 8 vectors are in flight
  const CommParams& p = exchange.p;
#pragma unroll
  for (int first = 0; first < kVecs; first += at_once) {
    uint4 x[at_once][kWorld];
    const bool fine = receive(exchange, [&](int& missing) {
#pragma unroll
      for (int r = 0; r < kWorld; ++r)
#pragma unroll
        for (int k = 0; k < at_once; ++k)
          x[k][r] = r < p.world && r != p.rank && row.inside(first + k)
                        ? load_system(base + inbox_of(r, p.rank, p.world) * inbox_stride + row.index(first + k))
                        : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int r = 0; r < kWorld; ++r)
#pragma unroll
        for (int k = 0; k < at_once; ++k)
          if (!arrived(x[k][r])) missing = r;
    });
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
#pragma unroll
      for (int i = 0; i < ReducedRow<T>::kVec; ++i) sum[first + k][i] = 0.f;
#pragma unroll
      for (int r = 0; r < kWorld; ++r)
        if (r < p.world) ReducedRow<T>::add(either(r == p.rank, own[first + k], x[k][r]), sum[first + k]);
      if (!fine)
#pragma unroll
        for (int i = 0; i < ReducedRow<T>::kVec; ++i) sum[first + k][i] = __uint_as_float(kNanWord);
    }
  }
}

// s = sum + residual_in, rounded.
template <class T, int kOutput, int kVecs>
FI_DEVICE void round_sum(float (&sum)[kVecs][ReducedRow<T>::kVec], const uint4 (&residual)[kVecs], uint4 (&s)[kVecs]) {
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if constexpr (kOutput != kReduceSum) ReducedRow<T>::add(residual[k], sum[k]);
    ReducedRow<T>::to_words(sum[k], s[k]);
  }
}

// One shot: every rank sends its rows to all others and adds all rows. One hop; P - 1 messages in each direction.
template <class T, int kOutput, int kWorld, int kVecs>
FI_DEVICE void all_reduce_one_shot(const AllReduceParams& p) {
  __shared__ float warp_sums[32];
  const CommParams& c = p.comm;
  const int64_t inbox_stride = p.total;
  const int stride = static_cast<int>(gridDim.x);
  int row = static_cast<int>(blockIdx.x);
  pdl_wait();
  Exchange exchange(c);
  uint4 x[kVecs], next[kVecs], residual[kVecs], s[kVecs], w[kVecs];
  RowVectors<kVecs>(p, row).load(p.input, x);
  const auto send = [&](int at, uint4(&values)[kVecs]) {
    const RowVectors<kVecs> vectors(p, at);
    remove_empty_words(values);
    if (exchange.failed) return;
#pragma unroll
    for (int shift = 1; shift < kWorld; ++shift)
      if (shift < c.world) {
        const int peer = (c.rank + shift) % c.world;
        vectors.send(exchange.data(peer) + inbox_of(c.rank, peer, c.world) * inbox_stride + vectors.first, values);
      }
  };
  send(row, x);
  load_weight<kOutput>(p, w);
  if (blockIdx.x == 0) exchange.announce();
  Emptier emptier(exchange);
  if (p.early_trigger) pdl_launch_dependents();
  for (; row < p.rows; row += stride) {
    const RowVectors<kVecs> vectors(p, row);
    if (row + stride < p.rows) {
      RowVectors<kVecs>(p, row + stride).load(p.input, next);
      send(row + stride, next);
    }
    if constexpr (kVecs == 4) {  // loaded again: registers for two rows do not suffice
      vectors.load(p.input, x);
      remove_empty_words(x);
    }
    if constexpr (kOutput != kReduceSum) vectors.load(p.residual_in, residual);
    emptier.some(kVecs * (kWorld - 1));
    float sum[kVecs][ReducedRow<T>::kVec];
    receive_sum<T, kWorld>(exchange, vectors, exchange.data(c.rank) + vectors.first, inbox_stride, x, sum);
    round_sum<T, kOutput>(sum, residual, s);
    ReducedRow<T>::template store<kOutput>(p, row, s, w, warp_sums);
    if constexpr (kVecs < 4) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) x[k] = next[k];
    }
  }
  emptier.rest();
  if (blockIdx.x == 0) exchange.compare();
  exchange.finish(static_cast<uint32_t>(p.used));
}

// Two shots: row i belongs to rank i % P. Every rank sends a row to its owner, which adds and sends the result to all.
// Two hops; 2 (P - 1) / P messages in each direction. A CTA takes P neighbouring rows at a time, one of each owner, and
// sends those of its next iteration before it adds those of this one.
template <class T, int kOutput, int kWorld, int kVecs>
FI_DEVICE void all_reduce_two_shot(const AllReduceParams& p) {
  __shared__ float warp_sums[32];
  const CommParams& c = p.comm;
  const int groups = (p.rows + c.world - 1) / c.world, stride = static_cast<int>(gridDim.x);
  const int64_t inbox_stride = static_cast<int64_t>(groups) * p.vectors;
  const int64_t results = (c.world - 1) * inbox_stride;  // behind the inboxes: [rows, vectors]
  pdl_wait();
  Exchange exchange(c);
  uint4 w[kVecs];
  load_weight<kOutput>(p, w);
  const auto send_to_owners = [&](int group) {
    if (group >= groups || exchange.failed) return;
#pragma unroll
    for (int shift = 1; shift < kWorld; ++shift) {
      const int peer = (c.rank + shift) % c.world, row = group * c.world + peer;
      if (shift >= c.world || row >= p.rows) continue;
      const RowVectors<kVecs> vectors(p, row);
      uint4 x[kVecs];
      vectors.load(p.input, x);
      remove_empty_words(x);
      vectors.send(exchange.data(peer) + inbox_of(c.rank, peer, c.world) * inbox_stride +
                       static_cast<int64_t>(group) * p.vectors,
                   x);
    }
  };
  const auto add_own = [&](int group) {
    const int row = group * c.world + c.rank;
    if (group >= groups || row >= p.rows) return;
    const RowVectors<kVecs> vectors(p, row);
    uint4 x[kVecs], residual[kVecs], s[kVecs];
    vectors.load(p.input, x);
    remove_empty_words(x);
    if constexpr (kOutput != kReduceSum) vectors.load(p.residual_in, residual);
    float sum[kVecs][ReducedRow<T>::kVec];
    receive_sum<T, kWorld>(exchange, vectors, exchange.data(c.rank) + static_cast<int64_t>(group) * p.vectors,
                           inbox_stride, x, sum);
    round_sum<T, kOutput>(sum, residual, s);
    remove_empty_words(s);
    if (!exchange.failed)
#pragma unroll
      for (int shift = 1; shift < kWorld; ++shift)
        if (shift < c.world) vectors.send(exchange.data((c.rank + shift) % c.world) + results + vectors.first, s);
    ReducedRow<T>::template store<kOutput>(p, row, s, w, warp_sums);
  };
  const auto receive_results = [&](int group) {
#pragma unroll
    for (int shift = 1; shift < kWorld; ++shift) {
      const int peer = (c.rank + shift) % c.world, row = group * c.world + peer;
      if (shift >= c.world || row >= p.rows) continue;
      const RowVectors<kVecs> vectors(p, row);
      const uint4* from = exchange.data(c.rank) + results + vectors.first;
      uint4 s[kVecs];
      const bool fine = receive(exchange, [&](int& missing) {
#pragma unroll
        for (int k = 0; k < kVecs; ++k)
          s[k] = vectors.inside(k) ? load_system(from + vectors.index(k)) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < kVecs; ++k)
          if (!arrived(s[k])) missing = peer;
      });
      if (!fine)
#pragma unroll
        for (int k = 0; k < kVecs; ++k) s[k] = make_uint4(kNanWord, kNanWord, kNanWord, kNanWord);
      ReducedRow<T>::template store<kOutput>(p, row, s, w, warp_sums);
    }
  };
  int group = static_cast<int>(blockIdx.x);
  send_to_owners(group);
  if (blockIdx.x == 0) exchange.announce();
  Emptier emptier(exchange);
  if (p.early_trigger) pdl_launch_dependents();
  int before = -1;
  for (; group < groups; before = group, group += stride) {
    send_to_owners(group + stride);
    emptier.some(2 * kVecs * kWorld);
    add_own(group);
    if (before >= 0) receive_results(before);
  }
  if (before >= 0) receive_results(before);
  emptier.rest();
  if (blockIdx.x == 0) exchange.compare();
  exchange.finish(static_cast<uint32_t>(p.used));
}

}  // namespace fi
