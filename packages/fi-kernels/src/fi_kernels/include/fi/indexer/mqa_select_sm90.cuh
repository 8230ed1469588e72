// mqa_logits on Hopper with exact top-k behind it, in one cooperative launch: the logits of a few rows stay in L2.
//
// 1. CTAs compute logits as mqa_logits does and count them in bins of 5 bits of mantissa, of which each row has a total
//    in L2. All CTAs meet.
// 2. The CTAs share out the rows, several a row where there are few. Each finds the bin of the top_k-th logit and lists
//    the keys of its part of the row from that bin on, in order. Those in the bin are candidates, which the CTAs of a
//    row exchange. All CTAs meet.
// 3. Each finds the top_k-th logit among the candidates, hence how many results come before its part, and writes its
//    own. A row with too many candidates is left to one CTA, which reads it again for each digit of the logits.
//
// Every choice compares logits, then keys: neither the split of a row nor the order of candidates changes a result.
#pragma once
#include "fi/cuda/ptx/grid_arrive.cuh"
#include "fi/indexer/mqa_logits_sm90.cuh"
#include "fi/topk/radix_select.cuh"
#include "fi/topk/slice.cuh"

namespace fi {

// The bin of a logit; bins rise with logits. Magnitudes below 2^-32 share one of each sign, and so do those from 2^32.
constexpr int kSelectLeast = 95 << 5, kSelectHalf = kMqaSelectBins / 2;
FI_DEVICE int select_bin(float logit) {
  const uint32_t bits = __float_as_uint(canonical(logit));
  const int size = min(max(static_cast<int>(bits << 1 >> 19) - kSelectLeast, 0), kSelectHalf - 1);
  return bits >> 31 ? kSelectHalf - 1 - size : kSelectHalf + size;
}
// The smallest logit of a bin; NaN behind the last bin.
FI_DEVICE float select_least(int bin) {
  if (bin == kMqaSelectBins) return __uint_as_float(0x7fffffffu);
  if (bin == 0) return -infinity();
  if (bin == kSelectHalf) return 0.f;
  if (bin > kSelectHalf) return __int_as_float((bin - kSelectHalf + kSelectLeast) << 18);
  return -__int_as_float(((kSelectHalf - bin + kSelectLeast) << 18) - 1);
}
// Whether the logits of a bin share the first 12 bits of their keys.
FI_DEVICE bool select_shares(int bin) { return bin % kSelectHalf != 0 && bin % kSelectHalf != kSelectHalf - 1; }

// Steps 2 and 3, by kThreads threads: the others of the CTA have exited.
template <int kThreads>
struct MqaSelect {
  static constexpr int kWarps = kThreads / 32, kVec = 4, kBatch = 8;
  struct Shared {
    TopKShared top;
    uint64_t candidates[kMqaSelectCandidates];  // the key of a logit, then the row's key
    uint32_t lists[kWarps]
                  [2 * kMqaSelectCandidates];  // of the part's keys from the bin on, by warps; bit 31: candidate
    int listed[kWarps];
    uint32_t candidate_count, first, before, above, cut;
  };

  const MqaLogitsParams& p;
  Shared& shared;
  int row, part, parts;
  // What gather finds and finish needs.
  int length, begin, bin;
  uint32_t above, in_bin;

  FI_DEVICE MqaSelectRow& state() const { return p.state[row]; }
  FI_DEVICE const float* logits() const { return p.logits + row * p.logits_stride; }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }

  FI_DEVICE void gather() {
    length = p.end_of(row) - p.begin_of(row);
    if (length <= p.top_k) return;
    find_bin<kThreads, kMqaSelectBins>(state().bins, p.top_k, shared.top);
    bin = static_cast<int>(shared.top.bin), above = shared.top.above, in_bin = shared.top.in_bin;
    if (in_bin > kMqaSelectCandidates) return;
    if (threadIdx.x == 0) shared.candidate_count = shared.above = 0;
    __syncthreads();
    const int each = ((length + parts - 1) / parts + kVec - 1) / kVec * kVec;
    begin = min(part * each, length);
    list(begin, min(begin + each, length));
    __syncthreads();
    const uint32_t count = shared.candidate_count;
    if (threadIdx.x == 0) {
      state().above[part] = shared.above;
      shared.first = atomicAdd(&state().candidate_count, count);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads)
      state().candidates[shared.first + i] = shared.candidates[i];
  }

  // Lists the keys [from, to) whose logits are in the bin or above: each warp those of one run of them.
  FI_DEVICE void list(int from, int to) {
    constexpr int kStep = 32 * kVec;
    const float least = select_least(bin), more = select_least(bin + 1);
    const int run = ((to - from + kWarps - 1) / kWarps + kStep - 1) / kStep * kStep;
    const int last = min(from + (warp() + 1) * run, to);
    int count = 0, sure = 0;
#pragma unroll 1
    for (int step = from + warp() * run; step < last; step += kBatch * kStep) {
      Vec<float, kVec> x[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int key = step + b * kStep + lane() * kVec;
        if (key < last) x[b] = load<float, kVec>(logits() + key);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int key = step + b * kStep + lane() * kVec;
        uint32_t found = 0;
#pragma unroll
        for (int j = 0; j < kVec; ++j) found |= static_cast<uint32_t>(key + j < last && x[b].v[j] >= least) << j;
        if (!__any_sync(0xffffffffu, found)) continue;
        const int mine = __popc(found), up_to = warp_scan(mine);
        int at = count + up_to - mine;
        count += __shfl_sync(0xffffffffu, up_to, 31);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (!(found >> j & 1)) continue;
          const bool is_sure = x[b].v[j] >= more;
          sure += is_sure;
          shared.lists[warp()][at++] = static_cast<uint32_t>(key + j) | (is_sure ? 0 : 1u << 31);
          if (!is_sure)
            shared.candidates[atomicAdd(&shared.candidate_count, 1u)] =
                static_cast<uint64_t>(key_of(x[b].v[j])) << 32 | static_cast<uint32_t>(key + j);
        }
      }
    }
    if (sure) atomicAdd(&shared.above, static_cast<uint32_t>(sure));
    if (lane() == 0) shared.listed[warp()] = count;
  }

  // The top_k-th of n keys, of which `range` says what is known.
  template <class Key>
  FI_DEVICE KeyRange settle(KeyRange range, int n, Key key) {
    if (range.shift == 32) {
      clear<kThreads, kTopKFirstBins>(shared.top.histogram);
      __syncthreads();
#pragma unroll 4
      for (int i = threadIdx.x; i < n; i += kThreads) atomicAdd(&shared.top.histogram[range.digit(key(i))], 1u);
      __syncthreads();
      find_bin<kThreads, kTopKFirstBins>(shared.top.histogram, range.rank, shared.top);
      range = range.narrowed(shared.top);
    }
    return select_key<kThreads>(range, n, key, shared.top);
  }

  FI_DEVICE void put(int result, int key) const {
    const int64_t at = static_cast<int64_t>(row) * p.top_k + result;
    int found = key;
    if (p.mapped && key >= 0) {
      const int page = key / p.page_size;
      found = p.block_table[row / p.next_n * p.table_stride + page] * p.page_size + key - page * p.page_size;
    }
    p.indices[at] = found;
    if (p.scores) p.scores[at] = key >= 0 ? logits()[key] : -infinity();
  }

  FI_DEVICE void finish() {
    const bool alone = in_bin > kMqaSelectCandidates;
    if (length <= p.top_k) {
      for (int i = part * kThreads + threadIdx.x; i < p.top_k; i += parts * kThreads) put(i, i < length ? i : -1);
    } else if (!alone || part == 0) {
      const int count = alone ? length : static_cast<int>(in_bin);
      if (!alone)
        for (int i = threadIdx.x; i < count; i += kThreads) shared.candidates[i] = state().candidates[i];
      if (threadIdx.x == 0) shared.before = 0;
      __syncthreads();
      const auto key = [&](int i) {
        return alone ? key_of(logits()[i]) : static_cast<uint32_t>(shared.candidates[i] >> 32);
      };
      KeyRange range{0, 32, static_cast<uint32_t>(p.top_k), static_cast<uint32_t>(length)};
      if (!alone) range.rank -= above, range.count = in_bin;
      if (!alone && select_shares(bin)) range.lower = key(0) & 0xfff00000u, range.shift = 20;
      range = settle(range, count, key);
      if (alone)
        write_row(range);
      else
        write_part(range, count);
    }
    __syncthreads();
  }

  // The results of a row whose candidates are too many.
  FI_DEVICE void write_row(const KeyRange& range) {
    const uint32_t bound = range.bound();
    const auto count = [&](int i) { return count_of(key_of(logits()[i]), bound); };
    const OrderedScan<kThreads> order(length);
    const CtaScan sum = order.sum(count, shared.top);
    const Ties ties(sum.all, range.ties(), p.prefer_last);
    order.visit(sum.before, count, [&](int i, uint64_t seen) {
      const int result = ties.result(seen, key_of(logits()[i]), bound);
      if (result >= 0) put(result, i);
    });
  }

  // The results of a part.
  FI_DEVICE void write_part(const KeyRange& range, int count) {
    const auto key = [&](int i) { return static_cast<uint32_t>(shared.candidates[i] >> 32); };
    const auto place = [&](int i) { return static_cast<uint32_t>(shared.candidates[i]); };
    const uint32_t bound = range.bound(), ties = range.ties();
    if (ties) find_cut(range, count);  // synchronises
    const auto chosen = [&](uint32_t k, uint32_t at) {
      return k > bound || (ties && k == bound && (p.prefer_last ? at >= shared.cut : at <= shared.cut));
    };
    // Results before this part: keys above the bin of earlier parts, and candidates.
    uint32_t before = static_cast<int>(threadIdx.x) < part ? state().above[threadIdx.x] : 0;
    for (int i = threadIdx.x; i < count; i += kThreads)
      before += place(i) < static_cast<uint32_t>(begin) && chosen(key(i), place(i));
    before = __reduce_add_sync(0xffffffffu, before);
    if (lane() == 0 && before) atomicAdd(&shared.before, before);
    uint32_t* list = shared.lists[warp()];
    const int listed = shared.listed[warp()];
    int mine = 0;
    for (int i = lane(); i < listed; i += 32) {
      const uint32_t at = list[i] & 0x7fffffffu;
      const bool takes = at == list[i] || chosen(key_of(logits()[at]), at);
      list[i] = takes ? at : ~0u;
      mine += takes;
    }
    mine = __reduce_add_sync(0xffffffffu, mine);
    __syncthreads();
    if (lane() == 0) shared.listed[warp()] = mine;
    __syncthreads();
    int result = static_cast<int>(shared.before);
    for (int w = 0; w < warp(); ++w) result += shared.listed[w];
    for (int i = lane(); i < (listed + 31) / 32 * 32; i += 32) {
      const uint32_t at = i < listed ? list[i] : ~0u;
      const unsigned takes = __ballot_sync(0xffffffffu, at != ~0u);
      if (at != ~0u) put(result + __popc(takes & ((1u << lane()) - 1)), static_cast<int>(at));
      result += __popc(takes);
    }
  }

  // Of the candidates equal to the last chosen logit: the last key that is chosen, or the first with prefer_last.
  FI_DEVICE void find_cut(const KeyRange& range, int count) {
    const uint32_t wanted = p.prefer_last ? range.count - range.rank : range.rank - 1;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const uint64_t own = shared.candidates[i];
      if (own >> 32 != range.lower) continue;
      uint32_t smaller = 0;
      for (int j = 0; j < count; ++j)
        smaller += shared.candidates[j] >> 32 == range.lower && shared.candidates[j] < own;
      if (smaller == wanted) shared.cut = static_cast<uint32_t>(own);
    }
    __syncthreads();
  }
};

// The consumers of logits: they count them, then select.
template <class Logits>
struct MqaSelectSink {
  static constexpr int kThreads = Logits::kConsumers, kBins = Logits::kCtaRows * kMqaSelectBins;
  struct Counted {
    typename Logits::Shared logits;
    uint32_t bins[kBins];
  };
  union Shared {
    Counted counted;
    typename MqaSelect<kThreads>::Shared selected;
  };

  const MqaLogitsParams& p;
  Shared& shared;
  uint32_t arrived = 0;
  bool met = false;

  // Zeroes the totals in L2, of all rows by all CTAs, and those of the CTA.
  FI_DEVICE void start() {
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
      for (int i = threadIdx.x; i < kMqaSelectBins; i += kThreads) p.state[row].bins[i] = 0;
      if (threadIdx.x == 0) p.state[row].candidate_count = 0;
    }
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared.counted.bins[i] = 0;
    sync();
    if (threadIdx.x == 0) arrived = grid_arrive();
  }
  // Until all CTAs have zeroed.
  FI_DEVICE void meet() {
    if (!met && threadIdx.x == 0) grid_await(arrived);
    met = true;
    sync();
  }
  FI_DEVICE void seen(int row, float logit) const {
    atomicAdd(&shared.counted.bins[row * kMqaSelectBins + select_bin(logit)], 1u);
  }
  FI_DEVICE void end(int row) {
    meet();
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      uint32_t& count = shared.counted.bins[i];
      if (count) atomicAdd(&p.state[row + i / kMqaSelectBins].bins[i % kMqaSelectBins], count);
      count = 0;
    }
    sync();
  }
  FI_DEVICE void finish() {
    meet();
    grid_sync();  // the producer exits
    const int grid = gridDim.x, most = min(p.rows, grid), parts = min(grid / most, kMqaSelectParts);
#pragma unroll 1
    for (int first = 0; first < p.rows; first += most) {
      MqaSelect<kThreads> select{p, shared.selected, first + static_cast<int>(blockIdx.x) / parts,
                                 static_cast<int>(blockIdx.x) % parts, parts};
      const bool works = select.row < min(first + most, p.rows);
      if (works) select.gather();
      grid_sync();
      if (works) select.finish();
    }
    pdl_launch_dependents();
  }

 private:
  FI_DEVICE static void sync() { barrier_sync(1, kThreads); }
};

template <int kHeads, int kRows, int kRowGroups, bool kPaged>
struct MqaSelectKernel {
  using Logits = MqaLogitsWgmmaKernel<kHeads, kRows, kRowGroups, kPaged>;
  using Shared = typename MqaSelectSink<Logits>::Shared;
  const MqaLogitsParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    MqaSelectSink<Logits> sink{p, shared};
    Logits{p, shared.counted.logits}.run(sink);
  }
};

template <int kHeads, int kRows, int kRowGroups, bool kPaged, int kBytes>
FI_DEVICE void mqa_select_wgmma(const MqaLogitsParams& p) {
  run_in_shared<MqaSelectKernel<kHeads, kRows, kRowGroups, kPaged>, 1024, kBytes>(p);
}

}  // namespace fi
