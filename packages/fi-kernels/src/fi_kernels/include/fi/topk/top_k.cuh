// The k largest of a row segment: one radix selection by a group of blocks, each of which holds a slice of the row.
#pragma once
#include "fi/cuda/vec.cuh"
#include "fi/topk/radix.cuh"

// A row is read once from global memory; while it arrives, the first 12 bits of its keys are counted. Further digits
// are counted from shared memory until those in question fit into a list, which is then searched without the row. A
// bitmap of the keys that may be wanted makes the last step short, and keeps the order of the row: results do not
// depend on the number of blocks or on timing. (Radix selection: Alabi et al., "Fast k-selection algorithms for
// graphics processing units", ACM JEA 17, 2012.)
namespace fi {

// The blocks that share a row: here one. top_k_sm90.cuh has clusters.
struct LoneBlock {
  static constexpr bool kBulk = false;
  FI_DEVICE static unsigned rank() { return 0; }
  FI_DEVICE static unsigned size() { return 1; }
  FI_DEVICE static void arrive() {}
  FI_DEVICE static void wait() { __syncthreads(); }
  FI_DEVICE static uint32_t load(const uint32_t* p, unsigned) { return *p; }
  FI_DEVICE static uint4 load4(const uint32_t* p, unsigned) { return *reinterpret_cast<const uint4*>(p); }
  FI_DEVICE static void store(uint32_t* p, unsigned, uint32_t x) { *p = x; }
  FI_DEVICE static void store(uint64_t* p, unsigned, uint64_t x) { *p = x; }
  FI_DEVICE static void store4(uint32_t* p, unsigned, uint4 x) { *reinterpret_cast<uint4*>(p) = x; }
};

// The part of a row that a block works on, in vectors of 16 bytes that are aligned in global memory. Element e of the
// slice is x = origin + e of the segment; those outside of [begin, end) belong to no segment and are never read.
template <class T>
struct Slice {
  static constexpr int kVec = 16 / sizeof(T);
  using Vector = Vec<T, kVec>;

  const T* from;   // element 0
  Vector* shared;  // the first `held` vectors
  int vectors, held, begin, end, origin;

  FI_DEVICE bool valid(int e) const { return begin <= e && e < end; }
  // The vectors that lie in the segment altogether: all but perhaps the first and the last.
  FI_DEVICE int whole_begin() const { return begin > 0 ? 1 : 0; }
  FI_DEVICE int whole_end() const { return max(end / kVec, whole_begin()); }
  FI_DEVICE bool whole(int v) const { return whole_begin() <= v && v < whole_end(); }
  FI_DEVICE Vector read_whole(int v) const { return load<T, kVec>(from + static_cast<int64_t>(v) * kVec); }
  FI_DEVICE Vector read(int v) const {
    if (whole(v)) return read_whole(v);
    Vector x{};
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (valid(v * kVec + j)) x.v[j] = from[static_cast<int64_t>(v) * kVec + j];
    return x;
  }
  FI_DEVICE T element(int e) const { return e < held * kVec ? reinterpret_cast<const T*>(shared)[e] : from[e]; }
};

template <class T, class Group, int kThreads>
struct TopK {
  static constexpr int kVec = Slice<T>::kVec, kInFlight = 16 / kVec;  // vectors that a thread loads at once
  using Vector = typename Slice<T>::Vector;

  const TopKParams& p;
  TopKShared& shared;
  uint32_t* bitmap;  // kVec words for 32 vectors: bit i of word j is element j of vector i
  uint64_t* items;   // room for sorting
  unsigned row, rank, blocks;
  int start, length;
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

  FI_DEVICE int groups() const { return (slice.vectors + 31) / 32; }

  // The segment of this row, cut to the row, and this block's part of it.
  FI_DEVICE void locate() {
    start = p.row_starts ? min(max(p.row_starts[row], 0), p.width) : 0;
    length = p.lengths ? max(p.lengths[row], 0) : p.width;
    length = min(length, p.width - start);
    const T* first = static_cast<const T*>(p.input) + row * p.input_row + start;
    const int skew = static_cast<int>(reinterpret_cast<uint64_t>(first) % 16 / sizeof(T));
    const int all = (skew + length + kVec - 1) / kVec, each = ((all + blocks - 1) / blocks + 31) / 32 * 32;
    const int before = min(static_cast<int>(rank) * each, all);
    slice.vectors = min(each, all - before);
    slice.held = min(p.held, slice.vectors);
    slice.origin = before * kVec - skew;
    slice.from = first + slice.origin;
    slice.begin = max(-slice.origin, 0);
    slice.end = min(slice.vectors * kVec, length - slice.origin);
  }

  template <bool kWhole>
  FI_DEVICE void count(const Vector& x, int v, const KeyRange& range) {
    float f[kVec];
    to_float(x, f);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const uint32_t key = key_of(f[j]);
      if ((kWhole || slice.valid(v * kVec + j)) && range.contains(key))
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
      count<false>(x, v, range);
    });
    if constexpr (Group::kBulk) {
      const int chunk = Group::chunk(slice.held);
      for (int c = 0; c * chunk < slice.held; ++c) {
        Group::await(shared, c);
        for_vectors<2>(
            max(c * chunk, slice.whole_begin()), min((c + 1) * chunk, held_end), [&](int v) { return slice.shared[v]; },
            [&](const Vector& x, int v) { count<true>(x, v, range); });
      }
    } else {
      for_vectors<kInFlight>(slice.whole_begin(), held_end, read, [&](const Vector& x, int v) {
        slice.shared[v] = x;
        count<true>(x, v, range);
      });
    }
    for_vectors<kInFlight>(max(slice.held, slice.whole_begin()), slice.whole_end(), read,
                           [&](const Vector& x, int v) { count<true>(x, v, range); });
  }

  // Counts the next digit.
  FI_DEVICE void count_again(const KeyRange& range) {
    for_partial([&](const Vector& x, int v) { count<false>(x, v, range); });
    for_vectors<1>(
        slice.whole_begin(), slice.whole_end(),
        [&](int v) { return v < slice.held ? slice.shared[v] : slice.read_whole(v); },
        [&](const Vector& x, int v) { count<true>(x, v, range); });
  }

  // The histograms of the group, added up, in every block.
  template <int kBins>
  FI_DEVICE void merge() {
    Group::arrive();
    Group::wait();
    const unsigned share = kBins / blocks, first = rank * share;
    for (unsigned i = threadIdx.x * 4; i < share; i += kThreads * 4) {
      uint4 sum{};
      for (unsigned r = 0; r < blocks; ++r) {
        const uint4 x = Group::load4(shared.histogram + first + i, (rank + r) % blocks);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      for (unsigned r = 0; r < blocks; ++r) Group::store4(shared.total + first + i, (rank + r) % blocks, sum);
    }
    Group::arrive();
    Group::wait();
  }

  // Marks the elements from `lower` on; where that is no number, all of them. Invalid ones may be marked.
  FI_DEVICE void mark(uint32_t lower) {
    const float edge = value_of(lower);
    const int held_groups = (slice.held + 31) / 32;  // `held` is a multiple of 32 unless it is all
    mark_groups<32 / kVec>(0, held_groups, edge, [&](int v) { return slice.shared[min(v, slice.held - 1)]; });
    mark_groups<2>(held_groups, groups(), edge, [&](int v) { return slice.read(min(v, slice.vectors - 1)); });
  }
  template <int kAtOnce, class Read>
  FI_DEVICE void mark_groups(int from, int to, float edge, Read read) {
    const int lane = threadIdx.x % 32;
    constexpr int kWarps = kThreads / 32;
    for (int g = from + threadIdx.x / 32; g < to; g += kAtOnce * kWarps) {
      Vector x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = read((g + i * kWarps) * 32 + lane);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float f[kVec];
        to_float(x[i], f);
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const uint32_t marks = __ballot_sync(0xffffffffu, !(f[j] < edge));
          if (lane == j) word = marks;
        }
        if (lane < kVec && g + i * kWarps < to) bitmap[(g + i * kWarps) * kVec + lane] = word;
      }
    }
  }

  // Calls f(element, key) for the marked elements of this thread, a run of the slice, in order.
  template <class F>
  FI_DEVICE void for_marked(F f) {
    const int each = (groups() + kThreads - 1) / kThreads, first = threadIdx.x * each;
    for (int g = first; g < min(first + each, groups()); ++g) {
      uint32_t words[kVec], any = 0;
#pragma unroll
      for (int j = 0; j < kVec; j += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(bitmap + g * kVec + j);
        words[j] = four.x, words[j + 1] = four.y, words[j + 2] = four.z, words[j + 3] = four.w;
        any |= four.x | four.y | four.z | four.w;
      }
#pragma unroll 1
      for (; any; any &= any - 1) {
        const int i = __ffs(any) - 1;
        uint32_t marks = 0;  // of vector i
#pragma unroll
        for (int j = 0; j < kVec; ++j) marks |= (words[j] >> i & 1) << j;
#pragma unroll 1
        for (; marks; marks &= marks - 1) {
          const int e = (g * 32 + i) * kVec + __ffs(marks) - 1;
          if (slice.valid(e)) f(e, key_of(to_float(slice.element(e))));
        }
      }
    }
  }

  // Where this block's keys in the range belong in the list: behind those of the blocks before it.
  FI_DEVICE void start_list() {
    if (threadIdx.x >= 32) return;
    uint32_t before = threadIdx.x < rank ? Group::load(shared.histogram + shared.bin, threadIdx.x) : 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(0xffffffffu, before, step);
    if (threadIdx.x == 0) shared.cursor = before;
  }
  // The keys in the range of the whole row, in the list of every block.
  FI_DEVICE void fill_list(const KeyRange& range) {
    for_marked([&](int, uint32_t key) {
      if (!range.contains(key)) return;
      const uint32_t place = atomicAdd(&shared.cursor, 1u);
      for (unsigned r = 0; r < blocks; ++r) Group::store(shared.list + place, r, key);
    });
    Group::arrive();
    Group::wait();
  }

  // Where x comes to stand among the results of its row, and what is written there.
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
  FI_DEVICE void put(int place, int e, uint32_t key) {
    const int x = slice.origin + e;
    if (p.sorted) {
      const uint64_t item = static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(x);
      Group::store(items + place, 0, item);
    } else {
      write(place, x, slice.element(e));
    }
  }

  // The elements above the key in order, with the first (or last) `equal` of those equal to it between them.
  FI_DEVICE void put_selected(uint32_t key, uint32_t equal) {
    uint64_t mine = 0;  // elements above in the lower half, equal ones in the upper
    for_marked([&](int, uint32_t other) { mine += other > key ? 1 : other == key ? uint64_t{1} << 32 : 0; });
    const BlockSum sum = block_scan<kThreads>(mine, shared);
    uint64_t before = sum.before, all = sum.all;
    if (blocks > 1) {
      if (threadIdx.x < blocks) Group::store(shared.block_counts + rank, threadIdx.x, sum.all);
      Group::arrive();
      Group::wait();
      all = 0;
      for (unsigned r = 0; r < blocks; ++r) {
        if (r < rank) before += shared.block_counts[r];
        all += shared.block_counts[r];
      }
    }
    uint32_t above = static_cast<uint32_t>(before), ties = before >> 32;
    const uint32_t first_tie = p.prefer_last ? static_cast<uint32_t>(all >> 32) - equal : 0;
    for_marked([&](int e, uint32_t other) {
      const uint32_t ties_taken = ties > first_tie ? min(ties - first_tie, equal) : 0;
      const bool tie = other == key, wanted = tie && ties >= first_tie && ties < first_tie + equal;
      if (other > key || wanted) put(above + ties_taken, e, other);
      above += other > key;
      ties += tie;
    });
  }

  FI_DEVICE void select() {
    KeyRange range{0, 32, static_cast<uint32_t>(p.k)};
    take_in(range);
    pdl_launch_dependents();
    merge<kTopKFirstBins>();
    find_bin<kThreads, kTopKFirstBins>(shared.total, range.rank, shared);
    uint32_t in_range = shared.in_bin;
    range = range.narrowed(shared);
    while (in_range > kTopKList && in_range != range.rank && range.shift > 0) {
      __syncthreads();
      clear<kThreads, kTopKBins>(shared.histogram);
      __syncthreads();
      count_again(range);
      merge<kTopKBins>();
      find_bin<kThreads, kTopKBins>(shared.total, range.rank, shared);
      in_range = shared.in_bin;
      range = range.narrowed(shared);
    }
    const bool all = in_range == range.rank, search = !all && range.shift > 0;
    if (search) start_list();
    Group::arrive();
    mark(range.lower);
    __syncthreads();  // of the bitmap: the wait orders only what came before the arrival
    Group::wait();    // the list takes the place of the histogram
    if (search) {
      fill_list(range);
      range = select_in_list<kThreads>(range, in_range, shared);
    }
    put_selected(range.lower - all, all ? 0 : range.rank);
  }

  // No more elements than places.
  FI_DEVICE void take_all() {
    slice.held = 0;  // nothing was fetched
    for (int e = slice.begin + threadIdx.x; e < slice.end; e += kThreads)
      put(slice.origin + e, e, key_of(to_float(slice.from[e])));
    for (int place = length + rank * kThreads + threadIdx.x; place < p.k; place += blocks * kThreads) {
      const int64_t at = static_cast<int64_t>(row) * p.k + place;
      if (p.mapped) p.mapped[at] = -1;
      if (p.raw) p.raw[at] = -1;
    }
  }

  FI_DEVICE void put_sorted() {
    int m = 2;
    while (m < p.k) m *= 2;
    for (int i = p.k + threadIdx.x; i < m; i += kThreads) items[i] = 0;
    __syncthreads();
    sort_descending<kThreads>(items, m);
    const T* from = slice.from - slice.origin;  // the leader's: x counts from its first element
    for (int place = threadIdx.x; place < p.k; place += kThreads) {
      const int x = static_cast<int>(~static_cast<uint32_t>(items[place]));
      write(place, x, from[x]);
    }
  }

  FI_DEVICE void run() {
    clear<kThreads, kTopKFirstBins>(shared.histogram);
    if constexpr (Group::kBulk) Group::start(shared);
    __syncthreads();
    pdl_wait();
    locate();
    if (length <= p.k) {
      if (p.sorted) {  // every block of the group runs
        Group::arrive();
        Group::wait();
      }
      take_all();
    } else {
      if constexpr (Group::kBulk) Group::fetch(slice, shared);
      select();
    }
    if (p.sorted) {
      Group::arrive();
      Group::wait();
      if (rank == 0) put_sorted();
    }
  }
};

template <class T, int kThreads>
FI_DEVICE void top_k(const TopKParams& p) {
  extern __shared__ __align__(128) char memory[];
  TopK<T, LoneBlock, kThreads>(p, memory).run();
}

}  // namespace fi
