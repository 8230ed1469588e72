// One row in the hands of a team of blocks: passes over it, the sum of what may be drawn, a draw, and what is written.
#pragma once
#include "fi/sampling/row.cuh"
#include "fi/sampling/scratch.cuh"

namespace fi {
namespace sampling {

// Source: place(base) says where a piece is, load(place, further) gives kVec of its elements, at(slot) one, NaN where
// the row is not; each warp owns the pieces [begin, end).
template <class Team, class Source, int kWarps>
struct RowSampler {
  static constexpr int kVec = Source::kVec, kRows = kPiece / (32 * kVec);
  Scratch<Team, kWarps>& shared;
  const Source& source;
  float* list;     // room of this warp for kListed marked elements
  int begin, end;  // slots of this warp, whole pieces
  bool logits;
  Scale scale;
  uint32_t top, limit;  // keys of the largest and of the smallest element that may be drawn
  uint32_t mine;        // key of this thread's largest element
  Range marked;         // what is marked, and that sums are of what is above it
  bool summed;
  int listed, ends;  // marked elements; of lane i, at the end of the i-th piece in the order of `pieces`

  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }

  // f(x, j) for the vectors of a piece: row j of lane l is slots base + (32 j + l) kVec and on. A loop, since code
  // comes from memory, too; the other warps hide what one waits for.
  template <int kAtOnce, class F>
  FI_DEVICE void rows(int base, F&& f) const {
    const auto place = source.place(base);
#pragma unroll 1
    for (int j = 0; j < kRows; j += kAtOnce) {
      float x[kAtOnce][kVec];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) to_float(source.load(place, (32 * (j + i) + lane()) * kVec), x[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) f(x[i], j + i);
    }
  }
  // f(base) for all pieces. Half of the warps begin in the middle: not all wait for global memory at once.
  template <class F>
  FI_DEVICE void pieces(F&& f) const {
    const int n = (end - begin) / kPiece;
    int piece = warp() & 4 ? n / 2 : 0;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      f(begin + piece * kPiece);
      if (++piece == n) piece = 0;
    }
  }
  FI_DEVICE int peak_of(int base) const {
    const int shift = max(29 - __clz((end - begin) / kPiece - 1), 0);  // more than kPeaks pieces share
    return (base - begin) / kPiece >> shift;
  }
  FI_DEVICE uint32_t peak(int base) const { return shared.peak[warp()][peak_of(base)]; }
  FI_DEVICE Weight weight_of(float x) const { return logits ? logit_weight(x, scale) : prob_weight(x, scale); }
  FI_DEVICE uint32_t weight(float x) const { return coarse(weight_of(x)); }
  // Of a row of a piece; 0 for elements below `lowest`, chosen last: a branch for each element would cost more.
  FI_DEVICE void weigh(const float (&x)[kVec], float lowest, uint32_t (&w)[kVec]) const {
    if (logits) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[i] = coarse(logit_weight(x[i], scale));
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[i] = coarse(prob_weight(x[i], scale));
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) w[i] = x[i] >= lowest ? w[i] : 0u;
  }

  // The largest element of the row and of each thread's share. `bound`: the quantile-th largest, over the warps of the
  // team, of the rank-th largest of the threads' largest elements in a warp; 0 if there is none, or rank is 0. Returns
  // false if no element may be drawn.
  FI_DEVICE bool prepare(float temperature, int rank, int quantile, uint32_t& bound) {
    const float least = logits ? -__uint_as_float(kLargest) : __uint_as_float(kSmallest);
    const auto key_from = [&](float x) { return x >= least ? key_of(x) : 0u; };
    if (lane() < kPeaks) shared.peak[warp()][lane()] = 0;
    __syncwarp();
    uint32_t high = 0;
    mine = 0;
    summed = false;
    const int n = (end - begin) / kPiece, in_gap = source.pieces_in_gap();
    int piece = in_gap ? source.first_in_gap(begin) : 0;  // those that are not on their way to shared memory come first
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      if (i == in_gap) source.await();
      const int base = begin + piece * kPiece;
      if (++piece == n) piece = 0;
      float largest = __int_as_float(0x7fffffff);  // NaN
      rows<kRows>(base, [&](const float (&x)[kVec], int) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) largest = fmaxf(largest, x[i]);
      });
      const uint32_t key = key_from(largest), peak = __reduce_max_sync(0xffffffffu, key);
      mine = max(mine, key);
      high = max(high, peak);
      if (lane() == 0) {
        uint32_t& place = shared.peak[warp()][peak_of(base)];
        place = max(place, peak);
      }
    }
    bound = 0;
    uint32_t ranked = 0, rest = mine;
#pragma unroll 1
    for (int i = 0; i < rank; ++i) {
      ranked = __reduce_max_sync(0xffffffffu, rest);
      if (lane() == __ffs(__ballot_sync(0xffffffffu, rest == ranked)) - 1) rest = 0;
    }
    Team::meet();
    publish(shared.ends, uint64_t{high} << 32 | ranked);
    top = 0;
    over_warps(shared.ends, [&](uint64_t ends, unsigned) { top = max(top, static_cast<uint32_t>(ends >> 32)); });
    top = __reduce_max_sync(0xffffffffu, top);
    if (top == 0) return false;
    if (rank) {
      if (warp() == 0) {
        const uint32_t found = quantile_of_ranked(quantile);
        if (lane() == 0) shared.few.found = found;
      }
      __syncthreads();
      bound = shared.few.found;
    }
    scale = logits ? logits_scale(value_of(top), temperature) : probs_scale(value_of(top));
    limit = key_of(scale.lowest);
    return true;
  }

  // Of what prepare's warps published, by one warp: at or a little below the quantile-th largest, 0 if there is none.
  FI_DEVICE uint32_t quantile_of_ranked(int quantile) const {
    uint32_t high = 0, low = ~0u, there = 0;  // of those that are not zero
    over_warps(shared.ends, [&](uint64_t ends, unsigned) {
      const uint32_t key = static_cast<uint32_t>(ends);
      high = max(high, key);
      low = min(low, key - 1);
      there += key != 0;
    });
    if (static_cast<int>(__reduce_add_sync(0xffffffffu, there)) < quantile) return 0;
    high = __reduce_max_sync(0xffffffffu, high);
    low = __reduce_min_sync(0xffffffffu, low) + 1;
    return quantile_of(quantile, low, high, [&](uint32_t key) {
      uint32_t count = 0;
      over_warps(shared.ends, [&](uint64_t ends, unsigned) { count += static_cast<uint32_t>(ends) >= key; });
      return static_cast<int>(__reduce_add_sync(0xffffffffu, count));
    });
  }

  // Gives a warp's value to the blocks of the team, and waits for those of the others.
  using Values = uint64_t[Team::kLargest][kWarps];
  FI_DEVICE static void publish(Values& values, uint64_t mine) {
    if (lane() < static_cast<int>(Team::size())) Team::write(values[Team::rank()][warp()], lane(), mine);
    Team::sync();
  }
  // f(value, warp of the team), dealt over the lanes.
  template <class F>
  FI_DEVICE static void over_warps(const Values& values, F&& f) {
    for (unsigned i = lane(); i < Team::size() * kWarps; i += 32) f(values[i / kWarps][i % kWarps], i);
  }

  // Adds up by piece the weights of the elements from a key on.
  FI_DEVICE void sum_from(uint32_t key) {
    const float lowest = value_of(key);
    clear_sums();
    summed = true;
    marked = {key, key - 1};
    pieces([&](int base) {
      if (peak(base) < key) return;
      uint64_t part = 0;
      rows<kRows>(base, [&](const float (&x)[kVec], int) {
        uint32_t w[kVec];
        weigh(x, lowest, w);
#pragma unroll
        for (int i = 0; i < kVec; ++i) part += w[i];
      });
      add_to_piece(base, part);
    });
  }
  FI_DEVICE void clear_sums() const {
    __syncwarp();
    if (lane() < kPeaks) shared.sums[warp()][lane()] = 0;
    __syncwarp();
  }
  // Lists the elements of the range, as far as there is room. With `rest`, also adds up, in all and by piece, the parts
  // of those above it, and in all those from `limit` on: one each, or their weights.
  FI_DEVICE void mark(Range range, bool weights, bool rest, uint64_t& above, uint64_t& all) {
    const float low = value_of(range.low), edge = value_of(range.high + 1), lowest = value_of(limit);
    above = all = 0;
    marked = range;
    summed = rest && weights;
    listed = ends = 0;
    clear_sums();
    int order = 0;
    pieces([&](int base) {
      if (peak(base) >= (rest ? limit : range.low)) {
        uint64_t part = 0;
        uint32_t bits = 0;  // which of this lane's elements are in the range
        rows<kRows>(base, [&](const float (&x)[kVec], int j) {
          uint32_t in = 0;
#pragma unroll
          for (int i = 0; i < kVec; ++i) in |= static_cast<uint32_t>(x[i] >= low && !(x[i] >= edge)) << i;
          bits |= in << (j * kVec);
          if (rest) add_up(x, weights, lowest, edge, part, all);
        });
        const int own = __popc(bits), through = warp_scan(own);
        int at = listed + through - own;
        listed += __shfl_sync(0xffffffffu, through, 31);
#pragma unroll 1
        for (; bits && at < kListed; bits &= bits - 1) {
          const int i = __ffs(static_cast<int>(bits)) - 1;
          list[at++] = source.at(source.place(base), (32 * (i / kVec) + lane()) * kVec + i % kVec);
        }
        above += part;
        if (rest) add_to_piece(base, part);
      }
      if (lane() == order++) ends = listed;
    });
    __syncwarp();
  }
  // Whether the marked elements are in the list; else they are found again in the row.
  FI_DEVICE bool in_list() const { return listed <= kListed && end - begin <= 32 * kPiece; }
  FI_DEVICE void add_up(const float (&x)[kVec], bool weights, float lowest, float edge, uint64_t& above,
                        uint64_t& all) const {
    uint32_t w[kVec];
    if (weights) {
      weigh(x, lowest, w);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) w[i] = x[i] >= lowest;
    }
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {  // two are added by one instruction for each half
      all += uint64_t{w[i]} + w[i + 1];
      above += uint64_t{x[i] >= edge ? w[i] : 0u} + (x[i + 1] >= edge ? w[i + 1] : 0u);
    }
  }
  FI_DEVICE void add_to_piece(int base, uint64_t part) const {
    const uint64_t sum = warp_sum_u64(part);
    if (lane() == 0) shared.sums[warp()][peak_of(base)] += sum;
  }
  // f(x) for the marked elements, dealt over the lanes.
  template <class F>
  FI_DEVICE void each_marked(F&& f) const {
    const bool from_list = in_list();
    const float low = value_of(marked.low), edge = value_of(marked.high + 1);
    const int n = from_list ? listed : end - begin;
    int base = begin;
#pragma unroll 1
    for (int i = lane(); i < n; i += 32) {
      if (!from_list) base = begin + i / kPiece * kPiece;
      const float x = from_list ? list[i] : source.at(source.place(base), begin + i - base);
      if (x >= low && !(x >= edge)) f(x);
    }
  }

  // Whether the sums by piece and the marks together tell the weights from a key on.
  FI_DEVICE bool knows(uint32_t key) const { return summed && key >= marked.low && key <= marked.high + 1; }
  // Adds the weights of the marked elements from a key on to the sums by piece.
  FI_DEVICE void add_marked(uint32_t key) const {
    const float low = value_of(key), edge = value_of(marked.high + 1);
    const bool from_list = in_list();
    int order = 0, from = 0;
    pieces([&](int base) {
      const int to = from_list ? __shfl_sync(0xffffffffu, ends, order++) : kPiece;
      const auto place = source.place(base);
      uint64_t part = 0;
#pragma unroll 1
      for (int i = from + lane(); i < to; i += 32) {
        const float x = from_list ? list[i] : source.at(place, i);
        if (x >= low && !(x >= edge)) part += weight(x);
      }
      if (from_list) from = to;
      add_to_piece(base, part);
    });
  }
  // The sums by piece: of all, of this warp, and of what comes before it in the row.
  FI_DEVICE uint64_t total_weight(uint64_t& before, uint64_t& own) {
    __syncwarp();
    own = warp_sum_u64(lane() < kPeaks ? shared.sums[warp()][lane()] : 0);
    return collect(before, own);
  }
  // The probabilities over that of the largest; 0 below `lowest`, NaN stays. Of some elements of a piece.
  FI_DEVICE void ratios(const float (&x)[kVec], float lowest, float (&y)[kVec]) const {
    if (logits) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = logit_ratio(x[i], scale);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = prob_ratio(x[i], scale);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = x[i] >= lowest ? y[i] : 0.f;
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = x[i] != x[i] ? x[i] : y[i];
  }
  // The weight of all elements from `lowest` on, finer, for division. Ratios take the place of elements that are held.
  FI_DEVICE uint64_t total_fine(float lowest) const {
    const uint32_t least = key_of(lowest);
    uint64_t own = 0, before;
    pieces([&](int base) {
      if (peak(base) < least) return;
      const bool keeps = source.keeps(base);
      rows<1>(base, [&](const float (&x)[kVec], int j) {
        uint64_t w[kVec];
        float y[kVec];
        ratios(x, lowest, y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          w[i] = fine(weight_of(x[i]));
          w[i] = x[i] >= lowest ? w[i] : 0;
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) own += w[i];
        if (keeps) source.keep(base + (32 * j + lane()) * kVec, y);
      });
    });
    return collect(before, warp_sum_u64(own));
  }
  FI_DEVICE uint64_t collect(uint64_t& before, uint64_t own) const {
    publish(shared.weights, own);
    uint64_t total = 0;
    before = 0;
    const unsigned me = Team::rank() * kWarps + warp();
    over_warps(shared.weights, [&](uint64_t part, unsigned of) {
      total += part;
      if (of < me) before += part;
    });
    before = warp_sum_u64(before);
    return warp_sum_u64(total);
  }

  // The slot at which the weights from `lowest` on, summed in order from this warp's first, pass `target`.
  FI_DEVICE int locate(float lowest, uint64_t target) const {
    const uint64_t sum = lane() < kPeaks ? shared.sums[warp()][lane()] : 0, up_to = warp_scan(sum);
    const int place = __ffs(__ballot_sync(0xffffffffu, up_to > target)) - 1;
    uint64_t passed = __shfl_sync(0xffffffffu, up_to - sum, max(place, 0));
    int found = -1;
#pragma unroll 1
    for (int base = begin; base < end; base += kPiece) {
      if (peak_of(base) != place || peak(base) < key_of(lowest)) continue;
      rows<1>(base, [&](const float (&x)[kVec], int j) {
        if (found >= 0) return;
        uint32_t w[kVec];
        weigh(x, lowest, w);
        uint64_t part = 0;
#pragma unroll
        for (int i = 0; i < kVec; ++i) part += w[i];
        const uint64_t through = passed + warp_scan(part);
        const unsigned reached = __ballot_sync(0xffffffffu, through > target);
        if (reached) {
          uint64_t sum = through - part;
          int at = base + (32 * j + lane()) * kVec;
#pragma unroll
          for (int i = 0; i < kVec - 1; ++i) {
            sum += w[i];
            at += sum <= target;
          }
          found = __shfl_sync(0xffffffffu, at, __ffs(static_cast<int>(reached)) - 1);
        }
        passed = __shfl_sync(0xffffffffu, through, 31);
      });
    }
    return found;
  }

  // Writes vectors of each piece as f makes them of x, base of the piece and y.
  template <class O, class F>
  FI_DEVICE void write(O* out, int first, int last, F&& f) const {
    constexpr int kAtOnce = kVec * sizeof(O) > 16 ? 16 / sizeof(O) : kVec;
    out -= first;  // of slot 0
    const bool aligned = reinterpret_cast<uint64_t>(out) % 16 == 0;
#pragma unroll 1
    for (int base = begin; base < end; base += kPiece) {
      const bool whole = aligned && base >= first && base + kPiece <= last;
      rows<1>(base, [&](const float (&x)[kVec], int j) {
        float y[kVec];
        f(x, base, y);
        const int slot = base + (32 * j + lane()) * kVec;
        if (whole) {
#pragma unroll
          for (int i = 0; i < kVec; i += kAtOnce) {
            float part[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) part[k] = y[i + k];
            Vec<O, kAtOnce> rounded;
            from_float(part, rounded);
            store(out + slot + i, rounded);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (slot + i >= first && slot + i < last) out[slot + i] = from_float<O>(y[i]);
        }
      });
    }
  }
  template <class O>
  FI_DEVICE void write_renormalised(O* out, int first, int last, float lowest, uint64_t total) const {
    const float inverse = total ? __fdiv_rn(kFineOne, static_cast<float>(total)) : 0.f;
    const uint32_t least = key_of(lowest);
    write(out, first, last, [&](const float (&x)[kVec], int base, float (&y)[kVec]) {
      if (source.keeps(base) && peak(base) >= least) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = x[i];
      } else {
        ratios(x, lowest, y);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float product = times(y[i], inverse);
        y[i] = product > 1.f ? 1.f : product;
      }
    });
  }
  // The elements from `lowest` on, and NaN; the others become -inf.
  template <class O>
  FI_DEVICE void write_masked(O* out, int first, int last, float lowest) const {
    write(out, first, last, [&](const float (&x)[kVec], int, float (&y)[kVec]) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = x[i] < lowest ? __int_as_float(0xff800000) : x[i];
    });
  }
};

}  // namespace sampling
}  // namespace fi
