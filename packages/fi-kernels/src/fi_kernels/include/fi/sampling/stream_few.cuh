// Draws from the k largest of a row that is read once: the quarters of pieces with the k largest maxima have them all.
#pragma once
#include "fi/sampling/few.cuh"
#include "fi/sampling/stream.cuh"

namespace fi {
namespace sampling {

constexpr int kBins = 256;  // a lane has eight of them

template <int kWarps>
struct FewScratch {
  FewElements few;
  alignas(16) uint32_t bins[kBins];
  uint64_t parts[kWarps];
  uint16_t quarters[kFew];  // that have elements from the bound on
  uint32_t quarter_count, count;
};

// By the block that has the pieces of a row.
template <class T, int kWarps>
struct FewOfRow {
  const SampleParams& p;
  const StreamedRow<T>& row;
  PieceSum* pieces;
  int n;
  Scale scale;  // once the largest is known
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
  FI_DEVICE uint32_t key_of_quarter(int i) const { return reinterpret_cast<const uint32_t*>(pieces)[i]; }
  // The k-th largest of the quarters' keys or a little less, 0 if fewer are not 0; and the largest of all.
  FI_DEVICE uint32_t bound_of(int k, uint32_t& top) const {
    uint32_t high = 0, low = ~0u;
    for (int i = threadIdx.x; i < 4 * n; i += kWarps * 32) {
      const uint32_t key = key_of_quarter(i);
      high = max(high, key);
      low = min(low, key - 1);
    }
    high = __reduce_max_sync(0xffffffffu, high);
    low = __reduce_min_sync(0xffffffffu, low);
    if (lane() == 0) shared.parts[warp()] = uint64_t{high} << 32 | low;
    __syncthreads();
    const uint64_t ends = lane() < kWarps ? shared.parts[lane()] : 0xffffffffu;
    top = high = __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(ends >> 32));
    low = __reduce_min_sync(0xffffffffu, static_cast<uint32_t>(ends)) + 1;  // of those that are not 0
    // The bin of the k-th largest, then bins of that one, until few more are in it.
    int above = 0;
#pragma unroll 1
    while (true) {
      const int shift = max(24 - __clz(static_cast<int>(high - low)), 0);
      if (threadIdx.x < kBins) shared.bins[threadIdx.x] = 0;
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < 4 * n; i += kWarps * 32) {
        const uint32_t key = key_of_quarter(i);
        if (key >= low && key <= high) atomicAdd(&shared.bins[(high - key) >> shift], 1u);
      }
      __syncthreads();
      const uint4 some = reinterpret_cast<const uint4*>(shared.bins)[2 * lane()],
                  more = reinterpret_cast<const uint4*>(shared.bins)[2 * lane() + 1];
      const int counts[8] = {static_cast<int>(some.x), static_cast<int>(some.y), static_cast<int>(some.z),
                             static_cast<int>(some.w), static_cast<int>(more.x), static_cast<int>(more.y),
                             static_cast<int>(more.z), static_cast<int>(more.w)};
      int own = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) own += counts[i];
      const int through = above + warp_scan(own);
      const unsigned reached = __ballot_sync(0xffffffffu, through >= k);
      if (!reached) return 0;
      int bin = 8 * lane(), before = through - own, up_to = before + counts[0];
#pragma unroll
      for (int i = 1; i < 8; ++i)
        if (up_to < k) before = up_to, up_to += counts[i], ++bin;
      const int owner = __ffs(static_cast<int>(reached)) - 1;
      bin = __shfl_sync(0xffffffffu, bin, owner);
      up_to = __shfl_sync(0xffffffffu, up_to, owner);
      above = __shfl_sync(0xffffffffu, before, owner);
      const uint64_t end = (uint64_t{static_cast<uint32_t>(bin) + 1} << shift) - 1;  // of the bin, from high downwards
      low = end < high - low ? high - static_cast<uint32_t>(end) : low;
      if (shift == 0 || up_to <= k + k / 8) return low;
      high -= static_cast<uint32_t>(bin) << shift;
      __syncthreads();
    }
  }
  // Lists the elements from `key` on; returns their number, more than kFew if there is no room.
  FI_DEVICE int list(uint32_t key) {
    const float lowest = value_of(key);
    for (int i = threadIdx.x; i < 4 * n; i += kWarps * 32) {
      if (key_of_quarter(i) < key) continue;
      const uint32_t at = atomicAdd(&shared.quarter_count, 1u);
      if (at < kFew) shared.quarters[at] = static_cast<uint16_t>(i);
    }
    __syncthreads();
    const int count = shared.quarter_count;
    if (count > kFew) return count;
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int i = warp(); i < count; i += kAtOnce * kWarps) {
      float x[kAtOnce][4];
      int step;
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int token = first_of(i + a * kWarps, count, step);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[a][e] = row.at(token + e * step);
      }
      uint32_t bits = 0;
#pragma unroll
      for (int e = 0; e < 4 * kAtOnce; ++e) bits |= static_cast<uint32_t>(x[e / 4][e % 4] >= lowest) << e;
#pragma unroll 1
      for (; bits; bits &= bits - 1) {
        const int e = __ffs(static_cast<int>(bits)) - 1,
                  token = first_of(i + e / 4 * kWarps, count, step) + e % 4 * step;
        const uint32_t at = atomicAdd(&shared.count, 1u);
        if (at >= kFew) break;
        shared.few.elements[at] = {key_of(row.at(token)), 1};
        shared.few.tokens[at] = token;
      }
    }
    __syncthreads();
    return shared.count;
  }
  // The token of this lane's first element of the i-th quarter that is listed; past the row if there is none.
  FI_DEVICE int first_of(int i, int count, int& step) const {
    const int quarter = i < count ? shared.quarters[i] : 4 * n;
    return row.quarter(quarter / 4, quarter % 4, step);
  }

  // Where ties make too many for the list: the threshold by bisection, each step a pass over the pieces with elements
  // from the middle on. Adds up parts of those, one each or their weights; by piece, too.
  FI_DEVICE uint64_t tally(bool weights, uint32_t key) {
    const Weigher weigher = this->weigher(key);
    uint64_t all = 0;
    pieces_from(key, [&](int piece) {
      uint64_t sum = 0;
#pragma unroll 1
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
  FI_DEVICE uint32_t least(int64_t source) const { return key_of(min_p_bound(scale, at(p.min_p, source), row.logits)); }

  // From the keys of the quarters; false where ties make the elements too many, and the pieces then have their keys.
  FI_DEVICE bool draw(int output, int64_t source, uint64_t random) {
    const int32_t k = at(p.top_k, source);
    uint32_t top, bound = bound_of(k, top);
    if (top == 0) {
      if (threadIdx.x == 0) put_token(p, output, 0, false);
      return true;
    }
    scale = row.scale(top, at(p.temperature, source));
    bound = max(key_of(scale.lowest), bound);
    const int listed = list(bound);
    if (listed > kFew) {
      for (int i = threadIdx.x; i < n; i += kWarps * 32) {
        const PieceKeys keys = reinterpret_cast<const PieceKeys*>(pieces)[i];
        pieces[i] = {0, max(max(keys.of[0], keys.of[1]), max(keys.of[2], keys.of[3])), 0};
      }
      __syncthreads();
      return false;
    }
    const auto weight = [&](float x) { return Weigher{scale, scale.lowest, 0, row.logits}.of(x); };
    const auto chosen = shared.few.template choose<kWarps * 32>(listed, k, at(p.top_p, source), least(source), weight);
    const int token = shared.few.draw(listed, chosen.key, uniform_below(chosen.total, random));
    if (token >= 0) put_token(p, output, token, true);  // some threads, all the same
    return true;
  }
  // The smallest key that may be drawn, of a row whose pieces have their keys, and their weights from it on.
  FI_DEVICE uint32_t find(int64_t source) {
    uint32_t top = 0;
    for (int j = lane(); j < n; j += 32) top = max(top, pieces[j].key);
    top = __reduce_max_sync(0xffffffffu, top);
    scale = row.scale(top, at(p.temperature, source));
    const int32_t k = at(p.top_k, source);
    const float top_p = at(p.top_p, source);
    uint32_t low = key_of(scale.lowest);
    uint64_t target = k;
#pragma unroll 1
    for (int stage = k > 0 && k < p.vocab ? 0 : 1; stage < 3; ++stage) {  // by count, by weight, and what is left
      if (stage == 1 && !(top_p < 1.f)) continue;
      if (stage == 2) low = max(low, least(source));
      uint32_t high = stage == 2 ? low : top;
      bool known = stage == 0;  // the target
#pragma unroll 1
      do {
        const uint32_t middle = known ? low + (high - low + 1) / 2 : low;
        const uint64_t sum = tally(stage > 0, middle);
        if (!known)
          known = true, target = share_of(sum, top_p);
        else if (sum >= target)
          low = middle;
        else
          high = middle - 1;
      } while (low < high);
    }
    return low;
  }
};

}  // namespace sampling
}  // namespace fi
