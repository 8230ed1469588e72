// The k largest of a row segment: one radix selection by a group of blocks, each of which holds a slice of the row.
#pragma once
#include "fi/topk/radix.cuh"
#include "fi/topk/slice.cuh"

// A row is read once from global memory; while it arrives, the first 12 bits of its keys are counted. That leaves few
// elements in question: they are marked, and gathered in order by the first block, which finds the k-th largest among
// them. Where too many are left (large k, narrow values, ties), further digits are counted from shared memory, and each
// block writes the results of its slice. Order and ties follow the place in the row, so nothing depends on the number
// of blocks or on timing. (Radix selection: Alabi et al., "Fast k-selection algorithms for graphics processing units",
// ACM JEA 17, 2012.)
namespace fi {

// The blocks that share a row: here one. top_k_sm90.cuh has clusters.
struct LoneBlock {
  static constexpr bool kBulk = false;
  FI_DEVICE static unsigned rank() { return 0; }
  FI_DEVICE static unsigned size() { return 1; }
  FI_DEVICE static void sync() { __syncthreads(); }
  FI_DEVICE static uint4 load4(const uint32_t* p, unsigned) { return *reinterpret_cast<const uint4*>(p); }
  FI_DEVICE static void store4(uint32_t* p, unsigned, uint4 x) { *reinterpret_cast<uint4*>(p) = x; }
  FI_DEVICE static void store(uint64_t* p, unsigned, uint64_t x) { *p = x; }
};

template <class T, class Group, int kThreads>
struct TopK {
  static constexpr int kVec = Slice<T>::kVec, kInFlight = 16 / kVec;  // vectors that a thread loads at once
  using Vector = typename Slice<T>::Vector;

  const TopKParams& p;
  TopKShared& shared;
  uint32_t* bitmap;  // a bit for each vector that has a marked element
  uint64_t* items;   // room for sorting
  unsigned row, rank, blocks;
  int length;
  Slice<T> slice;

  FI_DEVICE TopK(const TopKParams& p, char* memory)
      : p(p),
        shared(*reinterpret_cast<TopKShared*>(memory + p.fixed_at)),
        bitmap(reinterpret_cast<uint32_t*>(memory + p.bitmap_at)),
        items(reinterpret_cast<uint64_t*>(memory + p.sort_at)),
        rank(Group::rank()),
        blocks(Group::size()) {
    slice.shared = reinterpret_cast<Vector*>(memory);
    row = blockIdx.x / blocks;
  }

  // The segment of this row, cut to the row, and this block's part of it.
  FI_DEVICE void locate() {
    const int start = p.row_starts ? min(max(p.row_starts[row], 0), p.width) : 0;
    length = p.lengths ? max(p.lengths[row], 0) : p.width;
    length = min(length, p.width - start);
    slice.place(static_cast<const T*>(p.input) + row * p.input_row + start, length, rank, blocks, p.held);
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

  // Calls f(vector, index) for each of [from, to), kBatch loads before their uses.
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

  // The first and the last vector of the slice if they are partial, by one thread each: f(vector, index).
  template <class F>
  FI_DEVICE void for_partial(F f) {
    const int v = threadIdx.x == 0 ? 0 : slice.vectors - 1;
    if (threadIdx.x < min(2, slice.vectors) && !slice.whole(v)) f(slice.read(v), v);
  }

  // Reads the slice into shared memory, as far as it is held there, and counts the first digit.
  FI_DEVICE void take_in(const KeyRange& range) {
    const int held_end = min(slice.held, slice.whole_end());
    const auto read = [&](int v) { return slice.read_whole(v); };
    for_partial([&](const Vector& x, int v) {
      if (v < slice.held) slice.shared[v] = x;
      count<false>(x, v, range, 0);
    });
    uint32_t least = 0;  // the k-th largest of the row is not below: smaller ones need no count
    if constexpr (Group::kBulk) {
      const int chunk = Group::chunk(slice.held);
#pragma unroll 1
      for (int c = 0; c * chunk < slice.held; ++c) {
        Group::await(shared, c);
        for_vectors<2>(
            max(c * chunk, slice.whole_begin()), min((c + 1) * chunk, held_end), [&](int v) { return slice.shared[v]; },
            [&](const Vector& x, int v) { count<true>(x, v, range, least); });
        if (c == 0 && slice.held > 2 * chunk && (chunk - 1) * kVec >= p.k) {
          __syncthreads();
          find_bin<kThreads, kTopKFirstBins>(shared.histogram, range.rank, shared);
          least = range.narrowed(shared).lower;
        }
      }
    } else {
      for_vectors<kInFlight>(slice.whole_begin(), held_end, read, [&](const Vector& x, int v) {
        slice.shared[v] = x;
        count<true>(x, v, range, 0);
      });
    }
    for_vectors<kInFlight>(max(slice.held, slice.whole_begin()), slice.whole_end(), read,
                           [&](const Vector& x, int v) { count<true>(x, v, range, least); });
  }

  // Finds the next digit of the k-th largest by the histograms of the group, added up in every block.
  template <int kBins>
  FI_DEVICE KeyRange find_digit(const KeyRange& range) {
    Group::sync();
    const uint32_t* counts = shared.histogram;
    if constexpr (Group::kBulk) {
      // Each block adds up an equal part of the bins: as many loads as a histogram has words, all at once.
      constexpr int kQuads = kBins / 4, kEach = (kQuads + kThreads - 1) / kThreads;
      const unsigned share = kQuads / blocks;
      uint4 x[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const unsigned n = threadIdx.x + i * kThreads;
        if (n < kQuads) x[i] = Group::load4(shared.histogram + (rank * share + n % share) * 4, n / share);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const unsigned n = threadIdx.x + i * kThreads;
        uint32_t* sum = shared.total + (rank * share + n % share) * 4;
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
        const unsigned n = threadIdx.x + i * kThreads, to = n / share;
        uint32_t* sum = shared.total + (rank * share + n % share) * 4;
        if (n < kQuads && to != rank) Group::store4(sum, to, *reinterpret_cast<const uint4*>(sum));
      }
      Group::sync();
      counts = shared.total;
    }
    find_bin<kThreads, kBins>(counts, range.rank, shared);
    return range.narrowed(shared);
  }

  // Counts the next digit of the elements in the range.
  FI_DEVICE KeyRange count_again(const KeyRange& range) {
    __syncthreads();
    clear<kThreads, kTopKBins>(shared.histogram);
    clear<kThreads, kTopKBins>(shared.total);
    __syncthreads();
    for_partial([&](const Vector& x, int v) { count<false>(x, v, range, 0); });
    for_vectors<1>(
        slice.whole_begin(), slice.whole_end(),
        [&](int v) { return v < slice.held ? slice.shared[v] : slice.read_whole(v); },
        [&](const Vector& x, int v) { count<true>(x, v, range, 0); });
    return find_digit<kTopKBins>(range);
  }

  // Marks vectors with an element from `lower` on. Invalid elements may cause a mark.
  FI_DEVICE void mark(uint32_t lower) {
    constexpr uint32_t infinity = 0xff800000u;  // its key
    const float edge = value_of(lower);
    const bool only_nan = lower > infinity;
    const int held_words = (slice.held + 31) / 32;  // `held` is a multiple of 32 unless it is all
    mark_words<4>(0, held_words, edge, only_nan, [&](int v) { return slice.shared[min(v, slice.held - 1)]; });
    mark_words<2>(held_words, slice.words(), edge, only_nan,
                  [&](int v) { return slice.read(min(v, slice.vectors - 1)); });
    __syncthreads();
  }
  template <int kAtOnce, class Read>
  FI_DEVICE void mark_words(int from, int to, float edge, bool only_nan, Read read) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = from + threadIdx.x / 32 * kAtOnce; word < to; word += kThreads / 32 * kAtOnce) {
      Vector x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = read((word + i) * 32 + lane);
      uint32_t mine = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float best = largest(x[i]);
        const bool marked = !(best < edge) && (best != best || !only_nan) && (word + i) * 32 + lane < slice.vectors;
        const uint32_t marks = __ballot_sync(0xffffffffu, marked);
        if (lane == i) mine = marks;
      }
      if (lane < kAtOnce && word + lane < to) bitmap[word + lane] = mine;
    }
  }

  // Lists the marked vectors of words [from, to), numbered from the first on; how many.
  FI_DEVICE int list_vectors(int from, int to) {
    const int each = (to - from + kThreads - 1) / kThreads, first = from + threadIdx.x * each;
    uint32_t mine = 0;
    for (int word = first; word < min(first + each, to); ++word) mine += __popc(bitmap[word]);
    const BlockSum sum = block_scan<kThreads>(mine, shared);
    int at = static_cast<int>(sum.before);
#pragma unroll 1
    for (int word = first; word < min(first + each, to); ++word)
#pragma unroll 1
      for (uint32_t marks = bitmap[word]; marks; marks &= marks - 1)
        shared.vectors[at++] = static_cast<uint16_t>((word - from) * 32 + __ffs(marks) - 1);
    __syncthreads();
    return static_cast<int>(sum.all);
  }
  // Counts of a vector.
  FI_DEVICE uint64_t count_vector(int v, uint32_t bound) const {
    float f[kVec];
    to_float(slice.at(v), f);
    uint64_t n = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (slice.valid(v * kVec + j)) n += count_of(key_of(f[j]), bound);
    return n;
  }

  // Writes x as result number `place` of the row.
  FI_DEVICE void write(int place, int x, T value) {
    const int64_t at = static_cast<int64_t>(row) * p.k + place;
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
      found = p.page_table[table * p.page_table_row + (starts ? starts[row] : 0) + page] * p.page_size +
              (x - page * p.page_size);
    } else if (p.offsets) {
      found += p.offsets[row];
    }
    p.mapped[at] = found;
    if (p.raw) p.raw[at] = x;
  }
  // The same, or in the room for sorting of the first block.
  FI_DEVICE void deliver(int place, int x, T value, uint32_t key) {
    if (p.sorted)
      Group::store(items + sort_slot(place), 0, static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(x));
    else
      write(place, x, value);
  }

  // Delivers the marked elements above `bound` in order, with `equal` of those equal to it between them; or gives them
  // to the first block as entries.
  FI_DEVICE void put_selected(uint32_t bound, uint32_t equal, bool as_entries) {
    const int words = slice.words(), window = as_entries ? kTopKWindow : kTopKEntries / 32;
    int listed = 0;
    BlockSum sum{};  // of a window
    uint64_t before = 0, all = 0;
    Ties ties{};
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // counts, then puts
#pragma unroll 1
      for (int from = 0; from < words; from += window) {
        const auto count = [&](int i) { return count_vector(from * 32 + shared.vectors[i], bound); };
        if (pass == 0 || words > window) {
          listed = list_vectors(from, min(from + window, words));
          sum = InOrder<kThreads>(listed).sum(count, shared);
        }
        if (pass == 0) {
          all += sum.all;
        } else {
          InOrder<kThreads>(listed).visit(before + sum.before, count, [&](int i, uint64_t seen) {
            put_vector(from * 32 + shared.vectors[i], seen, ties, bound, as_entries);
          });
          before += sum.all;
        }
      }
      if (pass == 0) {
        if (blocks > 1) {
          if (threadIdx.x < blocks) Group::store(shared.block_counts + rank, threadIdx.x, all);
          Group::sync();
          all = 0;
          for (unsigned r = 0; r < blocks; ++r) {
            if (r < rank) before += shared.block_counts[r];
            all += shared.block_counts[r];
          }
        }
        ties = Ties(all, equal, p.prefer_last);
      }
    }
  }
  // `seen`: counts of the elements before the vector.
  FI_DEVICE void put_vector(int v, uint64_t seen, const Ties& ties, uint32_t bound, bool as_entries) {
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
      const int place = ties.place(seen, key, bound);
      seen += count_of(key, bound);
      if (place < 0) continue;
      if (as_entries)
        Group::store(shared.entries + place, 0, entry_of(value, slice.origin + e));
      else
        deliver(place, slice.origin + e, value, key);
    }
  }

  // Delivers what the range, once settled, selects of n entries; by the first block alone.
  FI_DEVICE void finish(KeyRange range, int n) {
    const auto key = [&](int i) { return key_of(to_float(value_in<T>(shared.entries[i]))); };
    range = select_key<kThreads>(range, n, key, shared);
    const uint32_t bound = range.bound();
    const auto count = [&](int i) { return count_of(key(i), bound); };
    const InOrder<kThreads> order(n);
    const BlockSum sum = order.sum(count, shared);
    const Ties ties(sum.all, range.ties(), p.prefer_last);
    order.visit(sum.before, count, [&](int i, uint64_t seen) {
      const int place = ties.place(seen, key(i), bound);
      const uint64_t entry = shared.entries[i];
      if (place >= 0) deliver(place, static_cast<int>(entry), value_in<T>(entry), key(i));
    });
  }

  FI_DEVICE void select() {
    KeyRange range{0, 32, static_cast<uint32_t>(p.k), static_cast<uint32_t>(length)};
    take_in(range);
    pdl_launch_dependents();
    range = find_digit<kTopKFirstBins>(range);
    const auto marked = [&] { return p.k - range.rank + range.count; };  // elements in the range and above
#pragma unroll 1
    while (marked() > kTopKEntries && !range.settled()) range = count_again(range);
    mark(range.lower);
    const bool gather = marked() <= kTopKEntries;
    put_selected(gather ? range.lower - 1 : range.bound(), gather ? 0 : range.ties(), gather);
    if (gather) {
      Group::sync();
      if (rank == 0) finish(range, static_cast<int>(marked()));
    }
  }

  // No more elements than places.
  FI_DEVICE void take_all() {
    for (int e = slice.begin + threadIdx.x; e < slice.end; e += kThreads)
      deliver(slice.origin + e, slice.origin + e, slice.from[e], key_of(to_float(slice.from[e])));
    for (int place = length + rank * kThreads + threadIdx.x; place < p.k; place += blocks * kThreads) {
      const int64_t at = static_cast<int64_t>(row) * p.k + place;
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
    const T* from = slice.from - slice.origin;  // the first block's: x counts from its first element
    for (int place = threadIdx.x; place < p.k; place += kThreads) {
      const int x = static_cast<int>(~static_cast<uint32_t>(items[sort_slot(place)]));
      write(place, x, from[x]);
    }
  }

  FI_DEVICE void run() {
    clear<kThreads, kTopKFirstBins>(shared.histogram);
    clear<kThreads, kTopKFirstBins>(shared.total);
    if constexpr (Group::kBulk) Group::start(shared);
    __syncthreads();
    pdl_wait();
    locate();
    if (length <= p.k) {
      if (p.sorted) Group::sync();  // every block of the group runs: the first one receives
      take_all();
    } else {
      if constexpr (Group::kBulk) Group::fetch(slice, shared);
      select();
    }
    if (p.sorted) {
      Group::sync();
      if (rank == 0) write_sorted();
    }
  }
};

template <class T, int kThreads>
FI_DEVICE void top_k(const TopKParams& p) {
  extern __shared__ __align__(128) char memory[];
  TopK<T, LoneBlock, kThreads>(p, memory).run();
}

}  // namespace fi
