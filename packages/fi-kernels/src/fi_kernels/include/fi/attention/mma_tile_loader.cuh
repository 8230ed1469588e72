// Loads of Q, K and V tiles into swizzled shared memory on sm_80 and later: cp.async copies 16-bit elements directly,
// other types are converted on the way, and rotated or unaligned rows are read element by element.
#pragma once
#include "fi/attention/paged_kv.cuh"
#include "fi/attention/variant.h"
#include "fi/attention/vec8.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/swizzle.cuh"

namespace fi {

// Head dims are multiples of 64: those that are taken at a time. kKeys keys a step, kWarps warps of 16 kM rows.
template <int kQK, int kVO, int kSixteens, int kWarps, int kKeysOfStep>
struct TileShape {
  static constexpr int kDimQK = kQK, kDimVO = kVO, kM = kSixteens;
  // Of more keys a few words do not stay in registers: beside a user's code, and on sm_100.
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
  static constexpr int kMostKeys = Variant::kCustom ? 32 : 48;
#else
  static constexpr int kMostKeys = Variant::kCustom ? 32 : 64;
#endif
  static constexpr int kKeys = kKeysOfStep < kMostKeys ? kKeysOfStep : kMostKeys;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kM * kWarps;
  static_assert(2 * kKeys <= kThreads && kKeys % (kThreads / 8) == 0, "threads that find and copy keys and values");
};

// Packed rows [first, first + rows) of a request and a kv head, and the first column of the output.
struct QueryTile {
  int request, kv_head, first, rows, column;
};

enum TilePart { kK, kV };

// An address from which others follow: else each of those is kept in a register of its own from one step to the next,
// and registers are scarce.
FI_DEVICE unsigned base(size_t address) {
  auto x = static_cast<unsigned>(address);
  asm volatile("" : "+r"(x));
  return x;
}

// Rows in shared memory: lines of 128 bytes, whose 16-byte pieces are permuted by the lowest bits of the row's number,
// so that ldmatrix meets no bank twice.
template <class T, class Q, class KV, class Pages, class Shape>
struct MmaTileLoader {
  static constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads, kRows = Shape::kRows;
  static constexpr bool kHalf = IsHalf<T>::value;
  static constexpr bool kDirect = sizeof(KV) == sizeof(T);

  struct Shared {
    alignas(128) T q[kRows * Shape::kDimQK];
    T k[kKeys * Shape::kDimQK];
    T v[kKeys * Shape::kDimVO];
    KV raw_k[kDirect ? 8 : kKeys * Shape::kDimQK], raw_v[kDirect ? 8 : kKeys * Shape::kDimVO];  // before conversion
    const KV* begin[2];                // the first key and the first value of the kv head
    int64_t page_stride[2], token[2];  // of keys and values, in elements
    const KV* at[2][2][kKeys];         // of two steps, keys and values: their rows
    int begin_key, end_key;            // keys that any row sees
    int full_begin, full_end;          // keys that every row sees
    int flags;                         // what steps have in common
    float exponent[kRows];             // from a score to an exponent of 2
    HeadScores scores[kRows];
    Row row[kRows];
    // Of each thread's rows: registers are scarce. Largest scores before they are scaled, and sums of weights.
    float most[2 * Shape::kM][kThreads], sums[2 * Shape::kM][kThreads];
    uint64_t steps[Shape::kDimQK > 128 ? Shape::kDimQK / 2 : 256];  // rotary angles
  };

  const AttentionProblem& p;
  Shared& shared;
  const Pages& pages;

  // Of the piece of 8 elements of a row of `width` elements.
  FI_DEVICE static T* slot(T* tile, int r, int piece, int width) {
    return tile + r * width + piece / 8 * 64 + swizzled_chunk(r, piece % 8) * 8;
  }
  FI_DEVICE static unsigned address(T* tile, int r, int piece, int width) {
    return base(__cvta_generic_to_shared(slot(tile, r, piece, width)));
  }

  // Whether scores are finished before the softmax, which else scales them.
  FI_DEVICE bool finished() const { return p.special() || !(p.scores.sm_scale > 0.f); }

  FI_DEVICE void prepare(const QueryTile& tile) const {
    const int first = tile.first, rows = tile.rows, kv_head = tile.kv_head;
    if (p.rotary.enabled) {
#pragma unroll 1
      for (int k = threadIdx.x; k < p.head_dim_qk / 2; k += kThreads) shared.steps[k] = p.rotary.step(k);
    }
    if (threadIdx.x == 32) {  // not in the warp that has just begun the unit
      shared.begin[kK] = static_cast<const KV*>(p.k) + kv_head * p.k_head;
      shared.begin[kV] = static_cast<const KV*>(p.v) + kv_head * p.v_head;
      shared.page_stride[kK] = pages.k_page, shared.page_stride[kV] = pages.v_page;
      shared.token[kK] = p.k_token, shared.token[kV] = p.v_token;
    }
    if (threadIdx.x < kRows) {  // places beyond the last row repeat the first one; nothing stores their result
      const Row row = p.row(kv_head, first + (threadIdx.x < rows ? threadIdx.x : 0));
      shared.row[threadIdx.x] = row;
      const HeadScores scores = p.head_scores<CudaMath>(row.head);
      shared.scores[threadIdx.x] = scores;
      shared.exponent[threadIdx.x] = Variant::kCustom || finished() ? 1.f : scores.scale;
    }
    __syncthreads();
  }

  // The page of this thread's key or value of a step, which locate takes; beyond the end that of the last one.
  FI_DEVICE int page(int key, int end) const {
    return static_cast<int>(pages.page(min(key + static_cast<int>(threadIdx.x) % kKeys + 1, end) - 1));
  }
  // Where the keys and values of a step begin.
  FI_DEVICE void locate(int page, int key, int end, int stage) const {
    const int r = threadIdx.x % kKeys, part = threadIdx.x / kKeys;
    if (kThreads > 2 * kKeys && part > 1) return;
    shared.at[stage][part][r] = shared.begin[part] + page * shared.page_stride[part] +
                                pages.slot(min(key + r + 1, end) - 1) * shared.token[part];
  }

  // Whether elements are taken one by one, rotated or from rows that are not aligned.
  FI_DEVICE bool each(TilePart part) const { return !p.aligned || (part == kK && p.rotary.enabled); }

  // Keys or values from `key` on (zeros from `end` on), `dims` dimensions from `dim` on (then zeros), are sent on their
  // way by this thread: one piece of 8 of each line of 64 in kFetches rows. Without branches, so that the compiler may
  // put them between products. each: nothing is copied, which land makes good.
  static constexpr int kRowsOnce = kThreads / 8, kFetches = kKeys / kRowsOnce;
  template <TilePart kPart>
  FI_DEVICE void fetch(int i, bool each, int dim, int dims, int key, int end, int stage) const {
    constexpr int kWidth = kPart == kK ? Shape::kDimQK : Shape::kDimVO;
    // With 192 dimensions nothing of this may be kept from one step to the next.
    const int thread = kWidth > 128 ? static_cast<int>(base(threadIdx.x)) : threadIdx.x;
    const int piece = thread % 8, first = thread / 8;
    const int limit = each || static_cast<int>(base(key + first)) + i * kRowsOnce >= end ? 0 : dims - piece * 8;
    const KV* from = shared.at[stage][kPart][first + i * kRowsOnce] + dim + piece * 8;
#pragma unroll
    for (int line = 0; line < kWidth / 64; ++line) {
      const bool valid = line * 64 < limit;  // else nothing is read
      if constexpr (kDirect)
        cp_async_16(address(kPart == kK ? shared.k : shared.v, first, piece, kWidth) +
                        (i * kRowsOnce * kWidth + line * 64) * sizeof(T),
                    from + line * 64, valid);
      else
        cp_async_8(
            base(__cvta_generic_to_shared((kPart == kK ? shared.raw_k : shared.raw_v) + first * kWidth + piece * 8)) +
                i * kRowsOnce * kWidth + line * 64,
            from + line * 64, valid);
    }
  }
  template <TilePart kPart>
  FI_DEVICE void fetch_all(bool each, int dim, int dims, int key, int end, int stage) const {
#pragma unroll
    for (int i = 0; i < kFetches; ++i) fetch<kPart>(i, each, dim, dims, key, end, stage);
    cp_async_commit();
  }

  // This thread's copies have arrived, and go to their place if they are not there.
  template <TilePart kPart>
  FI_DEVICE void land(bool each, int dim, int dims, int key, int end, int stage) const {
    constexpr int kWidth = kPart == kK ? Shape::kDimQK : Shape::kDimVO;
    if (kDirect && !each) return;
    const int piece = threadIdx.x % 8;
#pragma unroll 1
    for (int r = threadIdx.x / 8; r < kKeys; r += kThreads / 8)
#pragma unroll 1
      for (int line = 0; line * 64 < min(dims, kWidth); ++line) {
        T* to = slot(kPart == kK ? shared.k : shared.v, r, line * 8 + piece, kWidth);
        const int x = line * 64 + piece * 8;
        if (!each) {
          Vec8<KV> block;
          block.read((kPart == kK ? shared.raw_k : shared.raw_v) + r * kWidth + x, true);
          put(to, block);
        } else if (key + r < end && x < dims) {
          put_each(to, shared.at[stage][kPart][r], dim + x, kPart == kK && p.rotary.enabled, key + r);
        } else {
          *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
      }
  }

  // Queries, dimensions from `dim` on, zeros beyond the last row and the last dimension.
  FI_DEVICE void stage_q(int dim, int rows) const {
    const int dims = p.head_dim_qk - dim, piece = threadIdx.x % 8;
    const bool each = p.rotary.enabled || !p.aligned;
    const int64_t token = p.q_token, head = p.q_head;
    const Q* const q = static_cast<const Q*>(p.q);
    if (sizeof(Q) == sizeof(T) && !each) {
      const int first = threadIdx.x / 8;
      const unsigned to = address(shared.q, first, piece, Shape::kDimQK);
#pragma unroll 4
      for (int r = 0; r < kRows; r += kThreads / 8) {
        const Row at = shared.row[first + r];
        const Q* from = q + at.i * token + at.head * head + dim + piece * 8;
#pragma unroll
        for (int line = 0; line < Shape::kDimQK / 64; ++line)
          if (line * 64 < dims)
            cp_async_16(to + (r * Shape::kDimQK + line * 64) * sizeof(T), from + line * 64,
                        first + r < rows && line * 64 + piece * 8 < dims);
      }
      return;
    }
#pragma unroll 1
    for (int r = threadIdx.x / 8; r < kRows; r += kThreads / 8) {
      const Row at = shared.row[r];
      const Q* from = q + at.i * token + at.head * head;
#pragma unroll 1
      for (int x = piece * 8; x < min(round_up_64(dims), Shape::kDimQK); x += 64) {
        T* to = slot(shared.q, r, x / 8, Shape::kDimQK);
        const bool inside = r < rows && x < dims;
        if (inside && each) {
          put_each(to, from, dim + x, p.rotary.enabled, p.mask.position(at.i));
        } else {
          Vec8<Q> block;
          block.clear();
          if (inside) block.read(from + dim + x, true);
          put(to, block);
        }
      }
    }
  }

 private:
  FI_DEVICE static int round_up_64(int x) { return (x + 63) / 64 * 64; }

  // One row's eight elements, to shared memory as T.
  template <class S>
  FI_DEVICE static void put(T* to, const Vec8<S>& x) {
    uint4 words;
    if constexpr (sizeof(S) == sizeof(T)) {
      memcpy(&words, &x, sizeof words);
#if __CUDA_ARCH__ >= 890
    } else if constexpr (sizeof(S) == 1 && kHalf) {
      uint2 eight;
      memcpy(&eight, &x, sizeof eight);
      words = make_uint4(halves(eight.x, S{}), halves(eight.x >> 16, S{}), halves(eight.y, S{}),
                         halves(eight.y >> 16, S{}));
#endif
    } else {
      float f[8];
      x.floats(f);
      words = make_uint4(pack_pair(f[0], f[1], T{}), pack_pair(f[2], f[3], T{}), pack_pair(f[4], f[5], T{}),
                         pack_pair(f[6], f[7], T{}));
    }
    *reinterpret_cast<uint4*>(to) = words;
  }

  // Vec8 elements at dim of a row, one by one: rotated, or from a row that is not aligned.
  template <class S>
  FI_DEVICE void put_each(T* to, const S* row, int dim, bool rotate, int64_t position) const {
    const auto read = [&](int d) { return to_float(row[d]); };
#pragma unroll 1
    for (int d = dim; d < dim + 8; ++d)
      to[d - dim] = from_float<T>(
          rotate ? rotated(read, d, p.head_dim_qk, position, shared.steps[rotary_pair(d, p.head_dim_qk)]) : read(d));
  }
};

}  // namespace fi
