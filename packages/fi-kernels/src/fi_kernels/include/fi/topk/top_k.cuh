// Selects the k largest elements of a row segment by radix selection with one cluster, each CTA of which holds a slice.
#pragma once
#include "fi/topk/radix_select.cuh"
#include "fi/topk/slice.cuh"

// The cluster reads a row once from global memory, and builds a histogram of the first 12 bits of the keys while the
// row arrives. Few elements then remain candidates. Each CTA flags the vectors that contain one in a bitmap and sends
// the candidates in order to CTA 0, which finds the k-th largest among them. If too many candidates remain (large k,
// narrow value range, ties), further radix passes count the next digits from shared memory, and each CTA writes the
// results of its slice. Order and ties follow the index in the row, so results depend neither on the number of CTAs nor
// on timing. (Radix selection: Alabi et al., "Fast k-selection algorithms for graphics processing units", ACM JEA 17,
// 2012.)
namespace fi {

// A cluster of one CTA. top_k_sm90.cuh defines larger clusters.
struct SingleCta {
  static constexpr bool kAsync = false;
  FI_DEVICE static unsigned rank() { return 0; }
  FI_DEVICE static unsigned size() { return 1; }
  FI_DEVICE static void sync() { __syncthreads(); }
  FI_DEVICE static uint4 load4(const uint32_t* p, unsigned) { return *reinterpret_cast<const uint4*>(p); }
  FI_DEVICE static void store4(uint32_t* p, unsigned, uint4 x) { *reinterpret_cast<uint4*>(p) = x; }
  FI_DEVICE static void store(uint64_t* p, unsigned, uint64_t x) { *p = x; }
};

template <class T, class Cluster, int kThreads>
struct TopK {
  static constexpr int kVec = Slice<T>::kVec, kInFlight = 16 / kVec;  // vectors that a thread loads at once
  using Vector = typename Slice<T>::Vector;

  const TopKParams& p;
  TopKShared& shared;
  uint32_t* bitmap;  // one bit per vector: contains a candidate
  uint64_t* items;   // items to be sorted, in CTA 0
  unsigned row, rank, ctas;
  int length;
  Slice<T> slice;

  FI_DEVICE TopK(const TopKParams& p, char* memory)
      : p(p),
        shared(*reinterpret_cast<TopKShared*>(memory + p.fixed_at)),
        bitmap(reinterpret_cast<uint32_t*>(memory + p.bitmap_at)),
        items(reinterpret_cast<uint64_t*>(memory + p.sort_at)),
        rank(Cluster::rank()),
        ctas(Cluster::size()) {
    slice.shared = reinterpret_cast<Vector*>(memory);
    row = blockIdx.x / ctas;
  }

  // Computes the segment of this row, clamped to the row, and this CTA's slice of it.
  FI_DEVICE void locate() {
    const int start = p.row_starts ? min(max(p.row_starts[row], 0), p.width) : 0;
    length = p.lengths ? max(p.lengths[row], 0) : p.width;
    length = min(length, p.width - start);
    slice.assign(static_cast<const T*>(p.input) + row * p.input_stride + start, length, rank, ctas, p.cached);
  }

  template <bool kWhole>
  FI_DEVICE void count(const Vector& x, int v, const KeyRange& range, uint32_t least) {
    float f[kVec];
    to_float(x, f);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const uint32_t key = key_of(f[j]);
      if ((kWhole || slice.valid(v * kVec + j)) && key >= least && range.contains(key))
        atomicAdd(&shared.histogram[range.digit(key)], 1u);
    }
  }

  // Calls f(vector, index) for the vectors [from, to); a thread issues kBatch loads before their uses.
  template <int kBatch, class Read, class F>
  FI_DEVICE void for_vectors(int from, int to, Read read, F f) {
#pragma unroll 1
    for (int v = from + threadIdx.x; v < to; v += kBatch * kThreads) {
      Vector x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (v + i * kThreads < to) x[i] = read(v + i * kThreads);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (v + i * kThreads < to) f(x[i], v + i * kThreads);
    }
  }

  // Calls f(vector, index) for the first and the last vector of the slice if they are partial, in one thread each.
  template <class F>
  FI_DEVICE void for_partial(F f) {
    const int v = threadIdx.x == 0 ? 0 : slice.vectors - 1;
    if (threadIdx.x < min(2, slice.vectors) && !slice.whole(v)) f(slice.read(v), v);
  }

  // Loads the slice into shared memory as far as it is cached there, and builds the histogram of the first digit.
  FI_DEVICE void load_and_count(const KeyRange& range) {
    const int cached_end = min(slice.cached, slice.whole_end());
    const auto read = [&](int v) { return slice.read_whole(v); };
    for_partial([&](const Vector& x, int v) {
      if (v < slice.cached) slice.shared[v] = x;
      count<false>(x, v, range, 0);
    });
    uint32_t least = 0;  // a lower bound of the k-th largest key: smaller keys are not counted
    if constexpr (Cluster::kAsync) {
      const int chunk = Cluster::chunk(slice.cached);
#pragma unroll 1
      for (int c = 0; c * chunk < slice.cached; ++c) {
        Cluster::await(shared, c);
        for_vectors<2>(
            max(c * chunk, slice.whole_begin()), min((c + 1) * chunk, cached_end),
            [&](int v) { return slice.shared[v]; }, [&](const Vector& x, int v) { count<true>(x, v, range, least); });
        if (c == 0 && slice.cached > 2 * chunk && (chunk - 1) * kVec >= p.k) {
          __syncthreads();
          find_bin<kThreads, kTopKFirstBins>(shared.histogram, range.rank, shared);
          least = range.narrowed(shared).lower;
        }
      }
    } else {
      for_vectors<kInFlight>(slice.whole_begin(), cached_end, read, [&](const Vector& x, int v) {
        slice.shared[v] = x;
        count<true>(x, v, range, 0);
      });
    }
    for_vectors<kInFlight>(max(slice.cached, slice.whole_begin()), slice.whole_end(), read,
                           [&](const Vector& x, int v) { count<true>(x, v, range, least); });
  }

  // Finds the next digit of the k-th largest from the histograms, summed over the cluster in every CTA.
  template <int kBins>
  FI_DEVICE KeyRange find_digit(const KeyRange& range) {
    Cluster::sync();
    const uint32_t* counts = shared.histogram;
    if constexpr (Cluster::kAsync) {
      // Each CTA sums an equal part of the bins: as many loads as a histogram has words, all in flight at once.
      constexpr int kQuads = kBins / 4, kEach = (kQuads + kThreads - 1) / kThreads;
      const unsigned bins_per_cta = kQuads / ctas;
      uint4 x[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const unsigned n = threadIdx.x + i * kThreads;
        if (n < kQuads)
          x[i] = Cluster::load4(shared.histogram + (rank * bins_per_cta + n % bins_per_cta) * 4, n / bins_per_cta);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const unsigned n = threadIdx.x + i * kThreads;
        uint32_t* sum = shared.total + (rank * bins_per_cta + n % bins_per_cta) * 4;
        if (n < kQuads) {
          if (x[i].x) atomicAdd(sum, x[i].x);
          if (x[i].y) atomicAdd(sum + 1, x[i].y);
          if (x[i].z) atomicAdd(sum + 2, x[i].z);
          if (x[i].w) atomicAdd(sum + 3, x[i].w);
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const unsigned n = threadIdx.x + i * kThreads, to = n / bins_per_cta;
        uint32_t* sum = shared.total + (rank * bins_per_cta + n % bins_per_cta) * 4;
        if (n < kQuads && to != rank) Cluster::store4(sum, to, *reinterpret_cast<const uint4*>(sum));
      }
      Cluster::sync();
      counts = shared.total;
    }
    find_bin<kThreads, kBins>(counts, range.rank, shared);
    return range.narrowed(shared);
  }

  // Runs one more radix pass: counts the next digit of the elements in the range.
  FI_DEVICE KeyRange radix_pass(const KeyRange& range) {
    __syncthreads();
    clear<kThreads, kTopKBins>(shared.histogram);
    clear<kThreads, kTopKBins>(shared.total);
    __syncthreads();
    for_partial([&](const Vector& x, int v) { count<false>(x, v, range, 0); });
    for_vectors<1>(
        slice.whole_begin(), slice.whole_end(),
        [&](int v) { return v < slice.cached ? slice.shared[v] : slice.read_whole(v); },
        [&](const Vector& x, int v) { count<true>(x, v, range, 0); });
    return find_digit<kTopKBins>(range);
  }

  // Sets the bitmap: flags vectors with an element whose key is at least `lower`. Elements outside the segment may set
  // a flag.
  FI_DEVICE void flag_candidates(uint32_t lower) {
    constexpr uint32_t infinity = 0xff800000u;  // the key of infinity
    const float bound = value_of(lower);
    const bool only_nan = lower > infinity;
    const int cached_words = (slice.cached + 31) / 32;  // `cached` is a multiple of 32 unless it covers the slice
    flag_words<4>(0, cached_words, bound, only_nan, [&](int v) { return slice.shared[min(v, slice.cached - 1)]; });
    flag_words<2>(cached_words, slice.words(), bound, only_nan,
                  [&](int v) { return slice.read(min(v, slice.vectors - 1)); });
    __syncthreads();
  }
  template <int kBatch, class Read>
  FI_DEVICE void flag_words(int from, int to, float bound, bool only_nan, Read read) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = from + threadIdx.x / 32 * kBatch; word < to; word += kThreads / 32 * kBatch) {
      Vector x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i] = read((word + i) * 32 + lane);
      uint32_t mine = 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float maximum = largest(x[i]);
        const bool flagged =
            !(maximum < bound) && (maximum != maximum || !only_nan) && (word + i) * 32 + lane < slice.vectors;
        const uint32_t flags = __ballot_sync(0xffffffffu, flagged);
        if (lane == i) mine = flags;
      }
      if (lane < kBatch && word + lane < to) bitmap[word + lane] = mine;
    }
  }

  // Lists the flagged vectors of the bitmap words [from, to), numbered from the first on. Returns their number.
  FI_DEVICE int list_flagged(int from, int to) {
    const int each = (to - from + kThreads - 1) / kThreads, first = from + threadIdx.x * each;
    uint32_t mine = 0;
    for (int word = first; word < min(first + each, to); ++word) mine += __popc(bitmap[word]);
    const CtaScan sum = cta_scan<kThreads>(mine, shared);
    int at = static_cast<int>(sum.before);
#pragma unroll 1
    for (int word = first; word < min(first + each, to); ++word)
#pragma unroll 1
      for (uint32_t flags = bitmap[word]; flags; flags &= flags - 1)
        shared.vectors[at++] = static_cast<uint16_t>((word - from) * 32 + __ffs(flags) - 1);
    __syncthreads();
    return static_cast<int>(sum.all);
  }
  // Counts the elements of a vector above and equal to `bound`.
  FI_DEVICE uint64_t count_vector(int v, uint32_t bound) const {
    float f[kVec];
    to_float(slice.at(v), f);
    uint64_t n = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (slice.valid(v * kVec + j)) n += count_of(key_of(f[j]), bound);
    return n;
  }

  // Writes element x as result number `result` of the row.
  FI_DEVICE void write(int result, int x, T value) {
    const int64_t at = static_cast<int64_t>(row) * p.k + result;
    if (p.indices) {
      p.indices[at] = x;
      static_cast<T*>(p.values)[at] = value;
      return;
    }
    int32_t found = x;
    if (p.page_table) {
      const int64_t table = p.table_rows ? p.table_rows[row] : static_cast<int>(row);
      const int32_t* starts = p.table_starts ? p.table_starts : p.row_starts;
      const int page = p.page_size == 1 ? x : x / p.page_size;
      found = p.page_table[table * p.page_table_stride + (starts ? starts[row] : 0) + page] * p.page_size +
              (x - page * p.page_size);
    } else if (p.offsets) {
      found += p.offsets[row];
    }
    p.mapped[at] = found;
    if (p.raw) p.raw[at] = x;
  }
  // Writes a result, or if sorted stores it in the sort buffer of CTA 0.
  FI_DEVICE void emit(int result, int x, T value, uint32_t key) {
    if (p.sorted)
      Cluster::store(items + sort_slot(result), 0, static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(x));
    else
      write(result, x, value);
  }

  // Emits the flagged elements above `bound` in order, with `equal` of those equal to it between them; with
  // `as_candidates`, sends them to CTA 0 instead.
  FI_DEVICE void emit_selected(uint32_t bound, uint32_t equal, bool as_candidates) {
    const int words = slice.words(), window = as_candidates ? kTopKWindow : kTopKCandidates / 32;
    int listed = 0;
    CtaScan sum{};  // over a window
    uint64_t before = 0, all = 0;
    Ties ties{};
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // the first pass counts, the second emits
#pragma unroll 1
      for (int from = 0; from < words; from += window) {
        const auto count = [&](int i) { return count_vector(from * 32 + shared.vectors[i], bound); };
        if (pass == 0 || words > window) {
          listed = list_flagged(from, min(from + window, words));
          sum = OrderedScan<kThreads>(listed).sum(count, shared);
        }
        if (pass == 0) {
          all += sum.all;
        } else {
          OrderedScan<kThreads>(listed).visit(before + sum.before, count, [&](int i, uint64_t seen) {
            emit_vector(from * 32 + shared.vectors[i], seen, ties, bound, as_candidates);
          });
          before += sum.all;
        }
      }
      if (pass == 0) {
        if (ctas > 1) {
          if (threadIdx.x < ctas) Cluster::store(shared.cta_counts + rank, threadIdx.x, all);
          Cluster::sync();
          all = 0;
          for (unsigned r = 0; r < ctas; ++r) {
            if (r < rank) before += shared.cta_counts[r];
            all += shared.cta_counts[r];
          }
        }
        ties = Ties(all, equal, p.prefer_last);
      }
    }
  }
  // `seen`: counts of the elements before the vector.
  FI_DEVICE void emit_vector(int v, uint64_t seen, const Ties& ties, uint32_t bound, bool as_candidates) {
    float f[kVec];
    to_float(slice.at(v), f);
    uint32_t found = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      found |= static_cast<uint32_t>(slice.valid(v * kVec + j) && key_of(f[j]) >= bound) << j;
#pragma unroll 1
    for (; found; found &= found - 1) {
      const int e = v * kVec + __ffs(found) - 1;
      const T value = slice.element(e);
      const uint32_t key = key_of(to_float(value));
      const int result = ties.result(seen, key, bound);
      seen += count_of(key, bound);
      if (result < 0) continue;
      if (as_candidates)
        Cluster::store(shared.candidates + result, 0, pack_candidate(value, slice.origin + e));
      else
        emit(result, slice.origin + e, value, key);
    }
  }

  // Emits what the range, once settled, selects of n candidates. CTA 0 calls it.
  FI_DEVICE void emit_from_candidates(KeyRange range, int n) {
    const auto key = [&](int i) { return key_of(to_float(candidate_value<T>(shared.candidates[i]))); };
    range = select_key<kThreads>(range, n, key, shared);
    const uint32_t bound = range.bound();
    const auto count = [&](int i) { return count_of(key(i), bound); };
    const OrderedScan<kThreads> order(n);
    const CtaScan sum = order.sum(count, shared);
    const Ties ties(sum.all, range.ties(), p.prefer_last);
    order.visit(sum.before, count, [&](int i, uint64_t seen) {
      const int result = ties.result(seen, key(i), bound);
      const uint64_t candidate = shared.candidates[i];
      if (result >= 0) emit(result, static_cast<int>(candidate), candidate_value<T>(candidate), key(i));
    });
  }

  FI_DEVICE void select() {
    KeyRange range{0, 32, static_cast<uint32_t>(p.k), static_cast<uint32_t>(length)};
    load_and_count(range);
    pdl_launch_dependents();
    range = find_digit<kTopKFirstBins>(range);
    const auto candidate_count = [&] { return p.k - range.rank + range.count; };  // elements in the range and above
#pragma unroll 1
    while (candidate_count() > kTopKCandidates && !range.settled()) range = radix_pass(range);
    flag_candidates(range.lower);
    const bool gather = candidate_count() <= kTopKCandidates;
    emit_selected(gather ? range.lower - 1 : range.bound(), gather ? 0 : range.ties(), gather);
    if (gather) {
      Cluster::sync();
      if (rank == 0) emit_from_candidates(range, static_cast<int>(candidate_count()));
    }
  }

  // Emits all elements of a segment that has at most k, and -1 for the remaining results.
  FI_DEVICE void emit_all() {
    for (int e = slice.begin + threadIdx.x; e < slice.end; e += kThreads)
      emit(slice.origin + e, slice.origin + e, slice.data[e], key_of(to_float(slice.data[e])));
    for (int result = length + rank * kThreads + threadIdx.x; result < p.k; result += ctas * kThreads) {
      const int64_t at = static_cast<int64_t>(row) * p.k + result;
      if (p.mapped) p.mapped[at] = -1;
      if (p.raw) p.raw[at] = -1;
    }
  }

  FI_DEVICE void write_sorted() {
    int m = 4;
    while (m < p.k) m *= 2;
    for (int i = p.k + threadIdx.x; i < m; i += kThreads) items[sort_slot(i)] = 0;
    __syncthreads();
    sort_descending<kThreads>(items, m);
    const T* from = slice.data - slice.origin;  // CTA 0's slice: x counts from its first element
    for (int result = threadIdx.x; result < p.k; result += kThreads) {
      const int x = static_cast<int>(~static_cast<uint32_t>(items[sort_slot(result)]));
      write(result, x, from[x]);
    }
  }

  FI_DEVICE void run() {
    clear<kThreads, kTopKFirstBins>(shared.histogram);
    clear<kThreads, kTopKFirstBins>(shared.total);
    if constexpr (Cluster::kAsync) Cluster::init_barriers(shared);
    __syncthreads();
    pdl_wait();
    locate();
    if (length <= p.k) {
      if (p.sorted) Cluster::sync();  // all CTAs of the cluster run before CTA 0 receives
      emit_all();
    } else {
      if constexpr (Cluster::kAsync) Cluster::load_async(slice, shared);
      select();
    }
    if (p.sorted) {
      Cluster::sync();
      if (rank == 0) write_sorted();
    }
  }
};

template <class T, int kThreads>
FI_DEVICE void top_k(const TopKParams& p) {
  extern __shared__ __align__(128) char memory[];
  TopK<T, SingleCta, kThreads>(p, memory).run();
}

}  // namespace fi
