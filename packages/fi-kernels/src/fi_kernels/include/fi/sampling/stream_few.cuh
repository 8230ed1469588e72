// Draws from the k largest of a row that is read once: the pieces with the k largest maxima have them all.
#pragma once
#include "fi/sampling/few.cuh"
#include "fi/sampling/stream.cuh"

namespace fi {
namespace sampling {

template <int kWarps>
struct FewScratch {
  FewElements few;
  uint64_t parts[kWarps];
  uint32_t count;
};

// By the block that has the pieces of a row.
template <class T, int kWarps>
struct FewOfRow {
  const SampleParams& p;
  const StreamedRow<T>& row;
  PieceSum* pieces;
  int n;
  Scale scale;
  FewScratch<kWarps>& shared;

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }
  FI_DEVICE Weigher weigher(uint32_t key) const { return {scale, value_of(key), 0, row.logits}; }
  // f(piece) for the pieces with elements from `key` on, dealt over the warps.
  template <class F>
  FI_DEVICE void pieces_from(uint32_t key, F&& f) const {
    int turn = warp();
#pragma unroll 1
    for (int base = 0; base < n; base += 32) {
      unsigned with = __ballot_sync(0xffffffffu, base + lane() < n && pieces[min(base + lane(), n - 1)].key >= key);
#pragma unroll 1
      for (; with; with &= with - 1)
        if (turn-- == 0) {
          turn = kWarps - 1;
          f(base + __ffs(static_cast<int>(with)) - 1);
        }
    }
  }
  // Lists the elements from `key` on, if there is room; returns their number.
  FI_DEVICE int list(uint32_t key) {
    const float lowest = value_of(key);
    pieces_from(key, [&](int piece) {
      const int first = piece * kPiece + lane();
      float x[StreamedRow<T>::kEach];
#pragma unroll
      for (int i = 0; i < StreamedRow<T>::kEach; ++i) x[i] = row.at(first + 32 * i);
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < StreamedRow<T>::kEach; ++i) bits |= static_cast<uint32_t>(x[i] >= lowest) << i;
#pragma unroll 1
      for (; bits; bits &= bits - 1) {
        const int token = first + 32 * (__ffs(static_cast<int>(bits)) - 1);
        const uint32_t at = atomicAdd(&shared.count, 1u);
        if (at >= kFew) break;
        shared.few.elements[at] = {key_of(row.at(token)), 1};
        shared.few.tokens[at] = token;
      }
    });
    __syncthreads();
    return shared.count;
  }

  // Where ties make too many for the list: the threshold by bisection, each step a pass over the pieces with elements
  // from the middle on. Adds up parts of those, one each or their weights; by piece, too.
  FI_DEVICE uint64_t tally(bool weights, uint32_t key) {
    const Weigher weigher = this->weigher(key);
    uint64_t all = 0;
    pieces_from(key, [&](int piece) {
      uint64_t sum = 0;
#pragma unroll 4
      for (int i = lane(); i < kPiece; i += 32) {
        const float x = row.at(piece * kPiece + i);
        sum += weights ? weigher.of(x) : static_cast<uint32_t>(x >= weigher.lowest);
      }
      sum = warp_sum_u64(sum);
      if (lane() == 0) pieces[piece].sum = sum;
      all += sum;
    });
    if (lane() == 0) shared.parts[warp()] = all;
    __syncthreads();
    all = warp_sum_u64(lane() < kWarps ? shared.parts[lane()] : 0);
    __syncthreads();
    return all;
  }
  // The largest key from which on the parts reach the target; low if none does.
  FI_DEVICE uint32_t bisect(bool weights, uint32_t low, uint32_t high, uint64_t target) {
#pragma unroll 1
    while (low < high) {
      const uint32_t middle = low + (high - low + 1) / 2;
      if (tally(weights, middle) >= target)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }

  FI_DEVICE uint32_t least(int64_t source) const { return key_of(min_p_bound(scale, at(p.min_p, source), row.logits)); }

  // As stream_row calls it.
  FI_DEVICE uint32_t draw(uint32_t top, int output, int64_t source) {
    const int32_t k = at(p.top_k, source);
    const uint32_t bound = max(key_of(scale.lowest), quantile_of(k, n, [&](int i) { return pieces[i].key; }));
    const int listed = list(bound);
    if (listed > kFew) {
      uint32_t key = bound;
#pragma unroll 1
      for (int stage = 0; stage < 2; ++stage) {  // by count, by weight
        const float top_p = at(p.top_p, source);
        if (stage && !(top_p < 1.f)) break;
        key = bisect(stage, key, top, stage ? share_of(tally(true, key), top_p) : k);
      }
      key = max(key, least(source));
      tally(true, key);
      return key;
    }
    const auto weight = [&](float x) { return Weigher{scale, scale.lowest, 0, row.logits}.of(x); };
    const uint32_t key = max(shared.few.choose(listed, k, at(p.top_p, source), weight), least(source));
    const uint64_t total = shared.few.weigh(listed, key, weight);
    const int token = shared.few.draw(listed, uniform_below(total, random_of(row_random(p, output))));
    if (token >= 0) put_token(p, output, token, true);  // some threads, all the same
    return 0;
  }
};

}  // namespace sampling
}  // namespace fi
