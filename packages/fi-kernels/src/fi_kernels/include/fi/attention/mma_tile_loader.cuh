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

// kQK and kVO: the columns of head_dim_qk and head_dim_vo of one step, multiples of 64. kKeys keys a step, kWarps warps
// of 16 kMTiles rows.
template <int kQK, int kVO, int kTiles16, int kWarps, int kKeysOfStep>
struct TileShape {
  static constexpr int kDimQK = kQK, kDimVO = kVO, kMTiles = kTiles16;
  // More keys spill a few registers, with the code of a variant and on sm_100.
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
  static constexpr int kMaxKeys = Variant::kCustom ? 32 : 48;
#else
  static constexpr int kMaxKeys = Variant::kCustom ? 32 : 64;
#endif
  static constexpr int kKeys = kKeysOfStep < kMaxKeys ? kKeysOfStep : kMaxKeys;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kMTiles * kWarps;
  static_assert(2 * kKeys <= kThreads && kKeys % (kThreads / 8) == 0, "threads that find and copy keys and values");
};

// Packed rows [first, first + rows) of a request and a kv head, and the first column of the output.
struct QueryTile {
  int request, kv_head, first, rows, column;
};

enum TilePart { kK, kV };

// Hides how an address is computed. Otherwise the compiler keeps each address that derives from it in a register from
// one step to the next.
FI_DEVICE unsigned opaque(size_t address) {
  auto x = static_cast<unsigned>(address);
  asm volatile("" : "+r"(x));
  return x;
}

// What NVFP4 keys need in shared memory: scales before conversion, and where they come from; empty for other types.
template <class KV, class Shape>
struct RawScales {};
template <class Shape>
struct RawScales<E2m1, Shape> {
  alignas(16) uint8_t raw_k_scales[Shape::kKeys * Shape::kDimQK / 16];
  uint8_t raw_v_scales[Shape::kKeys * Shape::kDimVO / 16];
  const uint8_t* scale_address[2][2][Shape::kKeys];  // [stage][K or V][key]
  int kv_head;
};

// Rows in shared memory are lines of 128 bytes in the 128-byte swizzle: ldmatrix has no bank conflicts.
template <class T, class Q, class KV, class Pages, class Shape>
struct MmaTileLoader {
  static constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads, kRows = Shape::kRows;
  static constexpr bool kHalf = kIsSame<T, __half>;
  static constexpr bool kDirect = sizeof(KV) == sizeof(T), kFp4 = kIsE2m1<KV>;
  static constexpr int kPerByte = kFp4 ? 2 : 1;  // elements of KV in a byte, for types of a byte

  struct Tiles {
    alignas(128) T q[kRows * Shape::kDimQK];
    T k[kKeys * Shape::kDimQK];
    T v[kKeys * Shape::kDimVO];
    KV raw_k[kDirect ? 8 : kKeys * Shape::kDimQK / kPerByte];  // before conversion
    KV raw_v[kDirect ? 8 : kKeys * Shape::kDimVO / kPerByte];
    const KV* head_base[2];                   // the first key and value of the kv head
    int64_t page_stride[2], token_stride[2];  // of keys and values, in elements
    const KV* row_address[2][2][kKeys];       // [stage][K or V][key]
    int begin_key, end_key;                   // keys that any row sees
    int full_begin, full_end;                 // keys that every row sees
    int flags;                                // StepFlags of all steps
    float exponent_scale[kRows];              // the factor from a score to an exponent of 2
    HeadScores scores[kRows];
    Row row[kRows];
    // Of each thread's rows, here because registers are scarce. row_max is that of unscaled scores.
    float row_max[2 * Shape::kMTiles][kThreads], row_sum[2 * Shape::kMTiles][kThreads];
    uint64_t rotary_steps[Shape::kDimQK > 128 ? Shape::kDimQK / 2 : 256];  // rotary angles
  };
  struct Shared : Tiles, RawScales<KV, Shape> {};

  const AttentionProblem& p;
  Shared& shared;
  const Pages& pages;

  // The address of a chunk of 8 elements in a row of `width` elements.
  FI_DEVICE static T* slot(T* tile, int r, int chunk, int width) {
    return tile + r * width + chunk / 8 * 64 + swizzled_chunk(r, chunk % 8) * 8;
  }
  FI_DEVICE static unsigned address(T* tile, int r, int chunk, int width) {
    return opaque(__cvta_generic_to_shared(slot(tile, r, chunk, width)));
  }

  // Whether scores are transformed before the softmax. Otherwise the softmax scales them.
  FI_DEVICE bool needs_transform() const { return p.special() || !(p.scores.sm_scale > 0.f); }

  FI_DEVICE void prepare(const QueryTile& tile) const {
    const int first = tile.first, rows = tile.rows, kv_head = tile.kv_head;
    if (p.rotary.enabled) {
#pragma unroll 1
      for (int k = threadIdx.x; k < p.head_dim_qk / 2; k += kThreads) shared.rotary_steps[k] = p.rotary.step(k);
    }
    if (threadIdx.x == 32) {  // the first warp is busy with the work tile
      shared.head_base[kK] = static_cast<const KV*>(p.k) + kv_head * p.k_head;
      if constexpr (kFp4) shared.kv_head = kv_head;
      shared.head_base[kV] = static_cast<const KV*>(p.v) + kv_head * p.v_head;
      shared.page_stride[kK] = pages.k_page, shared.page_stride[kV] = pages.v_page;
      shared.token_stride[kK] = p.k_token, shared.token_stride[kV] = p.v_token;
    }
    if (threadIdx.x < kRows) {  // rows beyond the last repeat the first; their results are not stored
      const Row row = p.row(kv_head, first + (threadIdx.x < rows ? threadIdx.x : 0));
      shared.row[threadIdx.x] = row;
      const HeadScores scores = p.head_scores<CudaMath>(row.head);
      shared.scores[threadIdx.x] = scores;
      shared.exponent_scale[threadIdx.x] = Variant::kCustom || needs_transform() ? 1.f : scores.scale;
    }
    __syncthreads();
  }

  // The page of this thread's key or value of a step, for compute_row_addresses; beyond the end the last page.
  FI_DEVICE int page(int key, int end) const {
    const int j = min(key + static_cast<int>(threadIdx.x) % kKeys + 1, end) - 1;
    if (kSplitTables && threadIdx.x >= kKeys) return static_cast<int>(pages.v_page_of(j));  // see compute_row_addresses
    return static_cast<int>(pages.page(j));
  }
  // Stores the addresses of the keys and values of a step.
  FI_DEVICE void compute_row_addresses(int page, int key, int end, int stage) const {
    const int r = threadIdx.x % kKeys, part = threadIdx.x / kKeys;
    if (kThreads > 2 * kKeys && part > 1) return;
    shared.row_address[stage][part][r] = shared.head_base[part] + page * shared.page_stride[part] +
                                         pages.slot(min(key + r + 1, end) - 1) * shared.token_stride[part];
    if constexpr (kFp4) {
      const KvScales& s = p.kv_scales;
      const int64_t slot = pages.slot(min(key + r + 1, end) - 1);
      shared.scale_address[stage][part][r] = part == kK
                                                 ? s.k + page * s.k_page + slot * s.k_token + shared.kv_head * s.k_head
                                                 : s.v + page * s.v_page + slot * s.v_token + shared.kv_head * s.v_head;
    }
  }

  // Whether elements are loaded one by one: rotated keys, or rows that are not aligned.
  FI_DEVICE bool elementwise(TilePart part) const { return !p.aligned || (part == kK && p.rotary.enabled); }

  // Starts this thread's copies of a K or V tile: one chunk of 8 elements of each line of 64, in kLoadsPerThread rows.
  // Keys from `end` on and columns from `dims` on become zeros. It has no branches, so the compiler can place copies
  // between mma. elementwise: copies nothing; finish_load loads the tile.
  static constexpr int kRowsPerLoad = kThreads / 8, kLoadsPerThread = kKeys / kRowsPerLoad;
  template <TilePart kPart>
  FI_DEVICE void load_async(int i, bool elementwise, int dim, int dims, int key, int end, int stage) const {
    constexpr int kWidth = kPart == kK ? Shape::kDimQK : Shape::kDimVO;
    // With 192 columns no register is left to keep these from one step to the next.
    const int thread = kWidth > 128 ? static_cast<int>(opaque(threadIdx.x)) : threadIdx.x;
    const int chunk = thread % 8, first = thread / 8;
    const int limit =
        elementwise || static_cast<int>(opaque(key + first)) + i * kRowsPerLoad >= end ? 0 : dims - chunk * 8;
    const KV* row = shared.row_address[stage][kPart][first + i * kRowsPerLoad];
    const KV* from = kFp4 ? row + (dim + chunk * 8) / 2 : row + dim + chunk * 8;
#pragma unroll
    for (int line = 0; line < kWidth / 64; ++line) {
      const bool valid = line * 64 < limit;  // else nothing is read
      if constexpr (kDirect)
        cp_async_16(address(kPart == kK ? shared.k : shared.v, first, chunk, kWidth) +
                        (i * kRowsPerLoad * kWidth + line * 64) * sizeof(T),
                    from + line * 64, valid);
      else if constexpr (kFp4)
        load_packed_async<kPart>(first + i * kRowsPerLoad, chunk, line, from, dim, stage, valid);
      else
        cp_async_8(
            opaque(__cvta_generic_to_shared((kPart == kK ? shared.raw_k : shared.raw_v) + first * kWidth + chunk * 8)) +
                i * kRowsPerLoad * kWidth + line * 64,
            from + line * 64, valid);
    }
  }
  // Four bytes of a line of 64 elements of NVFP4, and by the first of eight threads its four scales.
  template <TilePart kPart>
  FI_DEVICE void load_packed_async(int row, int chunk, int line, const KV* from, int dim, int stage, bool valid) const {
    constexpr int kWidth = kPart == kK ? Shape::kDimQK : Shape::kDimVO;
    const auto address = [](const void* at) { return opaque(__cvta_generic_to_shared(at)); };
    const int at = row * kWidth + line * 64;
    cp_async_4(address(kPart == kK ? shared.raw_k : shared.raw_v) + at / 2 + chunk * 4, from + line * 32, valid);
    if (chunk == 0)
      cp_async_4(address(kPart == kK ? shared.raw_k_scales : shared.raw_v_scales) + at / 16,
                 shared.scale_address[stage][kPart][row] + dim / 16 + line * 4, valid);
  }
  template <TilePart kPart>
  FI_DEVICE void load_tile_async(bool elementwise, int dim, int dims, int key, int end, int stage) const {
#pragma unroll
    for (int i = 0; i < kLoadsPerThread; ++i) load_async<kPart>(i, elementwise, dim, dims, key, end, stage);
    cp_async_commit();
  }

  // This thread's copies have arrived, and go to their place if they are not there.
  template <TilePart kPart>
  FI_DEVICE void finish_load(bool elementwise, int dim, int dims, int key, int end, int stage) const {
    constexpr int kWidth = kPart == kK ? Shape::kDimQK : Shape::kDimVO;
    if (kDirect && !elementwise) return;
    const int chunk = threadIdx.x % 8;
#pragma unroll 1
    for (int r = threadIdx.x / 8; r < kKeys; r += kThreads / 8)
#pragma unroll 1
      for (int line = 0; line * 64 < min(dims, kWidth); ++line) {
        T* to = slot(kPart == kK ? shared.k : shared.v, r, line * 8 + chunk, kWidth);
        const int x = line * 64 + chunk * 8;
        if (!elementwise) {
          Vec8<KV> block;
          const KV* from = (kPart == kK ? shared.raw_k : shared.raw_v) + (r * kWidth + x) / kPerByte;
          if constexpr (kFp4)
            block.read(from, (kPart == kK ? shared.raw_k_scales : shared.raw_v_scales) + (r * kWidth + x) / 16, true);
          else
            block.read(from, true);
          store_vec8(to, block);
        } else if (key + r < end && x < dims) {
          const uint8_t* scales = nullptr;
          if constexpr (kFp4) scales = shared.scale_address[stage][kPart][r];
          store_elementwise(to, shared.row_address[stage][kPart][r], scales, dim + x, kPart == kK && p.rotary.enabled,
                            key + r);
        } else {
          *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
      }
  }

  // Loads Q columns from `dim` on; zeros beyond the last row and column.
  FI_DEVICE void stage_q(int dim, int rows) const {
    const int dims = p.head_dim_qk - dim, chunk = threadIdx.x % 8;
    const bool elementwise = p.rotary.enabled || !p.aligned;
    const int64_t token = p.q_token, head = p.q_head;
    const Q* const q = static_cast<const Q*>(p.q);
    if (kIsSame<Q, T> && !elementwise) {
      const int first = threadIdx.x / 8;
      const unsigned to = address(shared.q, first, chunk, Shape::kDimQK);
#pragma unroll 4
      for (int r = 0; r < kRows; r += kThreads / 8) {
        const Row at = shared.row[first + r];
        const Q* from = q + at.i * token + at.head * head + dim + chunk * 8;
#pragma unroll
        for (int line = 0; line < Shape::kDimQK / 64; ++line)
          if (line * 64 < dims)
            cp_async_16(to + (r * Shape::kDimQK + line * 64) * sizeof(T), from + line * 64,
                        first + r < rows && line * 64 + chunk * 8 < dims);
      }
      return;
    }
#pragma unroll 1
    for (int r = threadIdx.x / 8; r < kRows; r += kThreads / 8) {
      const Row at = shared.row[r];
      const Q* from = q + at.i * token + at.head * head;
#pragma unroll 1
      for (int x = chunk * 8; x < min(round_up_64(dims), Shape::kDimQK); x += 64) {
        T* to = slot(shared.q, r, x / 8, Shape::kDimQK);
        const bool inside = r < rows && x < dims;
        if (inside && elementwise) {
          store_elementwise(to, from, nullptr, dim + x, p.rotary.enabled, p.mask.position(at.i));
        } else {
          Vec8<Q> block;
          block.clear();
          if (inside) block.read(from + dim + x, true);
          store_vec8(to, block);
        }
      }
    }
  }

 private:
  FI_DEVICE static int round_up_64(int x) { return (x + 63) / 64 * 64; }

  // Converts eight elements of a row to T and stores them in shared memory.
  template <class S>
  FI_DEVICE static void store_vec8(T* to, const Vec8<S>& x) {
    uint4 words;
    if constexpr (kIsE2m1<S>) {
      words = pairs_of(x, T{});
    } else if constexpr (kIsSame<S, T>) {
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

  // Loads eight elements of a row from `dim` on one by one: rotated, or from a row that is not aligned.
  template <class S>
  FI_DEVICE void store_elementwise(T* to, const S* row, const uint8_t* scales, int dim, bool rotate,
                                   int64_t position) const {
    const auto read = [&](int d) { return kv_element(row, scales, d); };
#pragma unroll 1
    for (int d = dim; d < dim + 8; ++d)
      to[d - dim] = from_float<T>(
          rotate ? rotated(read, d, p.head_dim_qk, position, shared.rotary_steps[rotary_pair(d, p.head_dim_qk)])
                 : read(d));
  }
};

}  // namespace fi
