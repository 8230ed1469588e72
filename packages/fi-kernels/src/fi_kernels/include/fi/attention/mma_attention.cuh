// Attention of a tile of packed query rows with mma.sync (sm_80 and later): warps of 16 kMTiles rows, KV tiles of kKeys
// keys, online softmax. T is the 16-bit type that holds q and k exactly; the softmax rounds probabilities to it for P
// V. A step covers kDimQK of head_dim_qk, and a CTA kDimVO columns of the output, so one kernel serves all head dims.
#pragma once
#include "fi/attention/mma_score_transform.cuh"
#include "fi/attention/mma_tile_loader.cuh"
#include "fi/attention/softmax.h"
#include "fi/attention/variant.h"
#include "fi/cuda/exchange.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"

namespace fi {

template <class T, class Q, class KV, class Pages, class Shape>
struct MmaAttention {
  static constexpr int kMTiles = Shape::kMTiles, kKeys = Shape::kKeys, kThreads = Shape::kThreads, kRows = Shape::kRows;
  static constexpr int kColumns = Shape::kDimVO, kN8Tiles = kKeys / 8;
  using Loader = MmaTileLoader<T, Q, KV, Pages, Shape>;
  using Shared = typename Loader::Shared;
  static constexpr bool kHasDimChunks = Shape::kDimQK == 128;  // of head dims beyond it
  using ScoreTransform = MmaScoreTransform<Shared, Shape>;
  using Scores = typename ScoreTransform::Scores;

  static constexpr int kOutColumns = 64, kOutPitch = kOutColumns + 4;  // of the output in shared memory
  static_assert(sizeof(float) * kRows * kOutPitch <= sizeof(Shared::q) + sizeof(Shared::k) + sizeof(Shared::v),
                "the output overwrites them");

  const AttentionProblem& p;
  Shared& shared;
  const QueryTile& tile;
  Loader loader;
  int warp, lane;
  float o[kMTiles][kColumns / 8][4];

  // The referenced structs should be in shared memory, as registers are scarce.
  FI_DEVICE MmaAttention(const AttentionProblem& p, Shared& shared, const QueryTile& tile, const Pages& pages)
      : p(p), shared(shared), tile(tile), loader{p, shared, pages}, warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  // All threads call prefetch_next() in each of the first two steps while copies are in flight. fixed_order: the bits
  // of a row do not depend on those beside it: KV tiles begin at multiples of their size, and each row's maximum
  // follows its own scores in each step.
  template <class PrefetchNext>
  FI_DEVICE void attend(Variant& variant, bool fixed_order, PrefetchNext&& prefetch_next) {
    // In warps that are idle here.
    if (threadIdx.x == 64) shared.flags = StepFlags::of(p, loader) | (fixed_order ? StepFlags::kFixedOrder : 0);
    if (threadIdx.x == 96) {
      const int first = p.row(0, tile.first).i, last = p.row(0, tile.first + tile.rows - 1).i;
      const int begin = p.mask.first_key(first);
      shared.begin_key = fixed_order ? begin - begin % kKeys : begin, shared.end_key = p.mask.end_key(last);
      shared.full_begin = p.mask.first_key(last), shared.full_end = p.mask.end_key(first);
    }
    clear();
    loader.prepare(tile);
    const int begin = shared.begin_key, end = shared.end_key;
    if (begin >= end) return;
    StepFlags flags{static_cast<int>(opaque(shared.flags))};
    const int first_page = loader.page(begin, end);
    loader.stage_q(0, tile.rows);
    loader.compute_row_addresses(first_page, begin, end, 0);
    __syncthreads();
    load_keys(flags, 0, begin, 0);
#pragma unroll 1
    for (int key = begin; key < shared.end_key; key += kKeys) {
      flags.set(StepFlags::kMasked, key < shared.full_begin || key + kKeys > shared.full_end);
      const int stage = flags.stage();
      int page = loader.page(key + kKeys, shared.end_key);
      if (flags.prefetches()) prefetch_next();
      cp_async_wait<0>();
      loader.template finish_load<kK>(flags.is(StepFlags::kElementwiseK), 0, p.head_dim_qk, key, shared.end_key, stage);
      __syncthreads();  // keys have arrived, and the values of the previous step are free
      Scores s;
#pragma unroll 1
      while (true) {
        clear(s);
        // Q K^T overlaps with the copies of V and with the addresses of the next keys.
        multiply_qk(s, p.head_dim_qk, [&](int step) {
          if (step < Loader::kLoadsPerThread)
            loader.template load_async<kV>(step, flags.is(StepFlags::kElementwiseV), tile.column, columns(), key,
                                           shared.end_key, stage);
          if (step == 3) cp_async_commit(), loader.compute_row_addresses(page, key + kKeys, shared.end_key, stage ^ 1);
        });
        if (Variant::kCustom || flags.is(StepFlags::kUpdatesMax) || softmax_with_current_max(s)) break;
        flags.set(StepFlags::kNewMax, true);  // this warp repeats the step: the keys are still in shared memory
        page = loader.page(key + kKeys, shared.end_key);
      }
      if (kHasDimChunks && flags.is(StepFlags::kDimChunks)) multiply_dim_chunks(s, flags, key, stage);
      cp_async_wait<0>();
      loader.template finish_load<kV>(flags.is(StepFlags::kElementwiseV), tile.column, columns(), key, shared.end_key,
                                      stage);
      __syncthreads();  // values have arrived, and the keys are free
      flags.set(StepFlags::kStage, stage == 0);
      if (Variant::kCustom || flags.is(StepFlags::kRare)) {  // one branch around all transforms
        if (kHasDimChunks && flags.is(StepFlags::kDimChunks)) loader.stage_q(0, tile.rows);
        const ScoreTransform transform{p, shared, tile, warp, lane};
        if constexpr (Variant::kCustom)
          transform.apply_variant(key, shared.end_key, s, variant);
        else if (flags.is(StepFlags::kTransformed))
          transform.scale(key, s);
        if (flags.is(StepFlags::kCustomMask)) transform.apply_custom_mask(key, s);
        if (!Variant::kCustom && flags.is(StepFlags::kMasked)) transform.apply_range_mask(key, s);
      }
      load_keys(flags, 0, key + kKeys, flags.stage());
      if (Variant::kSoftmax && (Variant::kCustom || flags.is(StepFlags::kUpdatesMax))) update_softmax(s);
      flags.set(StepFlags::kNewMax, false);
      multiply_pv(s, columns());
    }
    cp_async_wait<0>();  // the last step started copies of zero keys
  }

  // Normalises the rows and writes them through shared memory in whole lines of any dtype. sinks: [qo_heads], or null.
  FI_DEVICE void store(Variant& variant, const float* sinks = nullptr) {
    float* const staged = reinterpret_cast<float*>(&shared) + warp * 16 * kMTiles * kOutPitch;  // of this warp's rows
    const OutType type = p.out_type;
    const int bytes = out_bytes(type), rows = tile.rows, width = columns();
    const int64_t out_token = p.out_token, out_head = p.out_head;
    // Each operation runs for all rows, so that their latencies overlap.
    float row_sums[kMTiles][2], row_maxes[kMTiles][2], factor[kMTiles][2];
    for_rows([&](int x, int half) {
      row_sums[x][half] = row_sum(x, half), row_maxes[x][half] = row_max(x, half) * exponent_scale(x, half);
      factor[x][half] = p.value_scale(tile.kv_head);
    });
    for_rows([&](int x, int half) { row_sums[x][half] += __shfl_xor_sync(0xffffffffu, row_sums[x][half], 1); });
    for_rows([&](int x, int half) { row_sums[x][half] += __shfl_xor_sync(0xffffffffu, row_sums[x][half], 2); });
    if (sinks) {
      for_rows([&](int x, int half) {
        factor[x][half] *=
            add_sink<CudaMath>(sinks[shared.row[tile_row(x, half)].head], row_maxes[x][half], row_sums[x][half]);
      });
    }
    for_rows([&](int x, int half) {
      const auto output =
          variant.end(shared.row[tile_row(x, half)], row_maxes[x][half], row_sums[x][half], factor[x][half]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int c = half * 2; c < half * 2 + 2; ++c) o[x][n][c] = output(o[x][n][c]);
    });
    if (p.lse && tile.column == 0 && lane % 4 == 0) {
      for_rows([&](int x, int half) {
        const Row at = shared.row[tile_row(x, half)];
        if (tile_row(x, half) < rows)
          p.lse[static_cast<int64_t>(at.i) * p.qo_heads + at.head] =
              softmax_lse<CudaMath>(row_maxes[x][half], row_sums[x][half]);
      });
    }
    constexpr OutType kOutTypeOfT = kIsSame<T, __half> ? OutType::kF16 : OutType::kBF16;
    const auto alignment = reinterpret_cast<uint64_t>(p.out) | (out_token | out_head) * sizeof(T);
    if (type == kOutTypeOfT && alignment % 16 == 0) return store_as_t(width);
    const int lane =
        static_cast<int>(opaque(threadIdx.x)) % 32;  // computed here: no register holds it during the mainloop
    __syncthreads();
#pragma unroll
    for (int from = 0; from < kColumns; from += kOutColumns) {
      if (from >= columns()) break;
      __syncwarp();
#pragma unroll
      for (int x = 0; x < kMTiles; ++x)
#pragma unroll
        for (int n = 0; n < kOutColumns / 8; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* pair = &o[x][from / 8 + n][half * 2];
            *reinterpret_cast<float2*>(staged + (x * 16 + half * 8 + lane / 4) * kOutPitch + n * 8 + lane % 4 * 2) =
                make_float2(pair[0], pair[1]);
          }
      __syncwarp();
#pragma unroll 2
      for (int r = lane / 16; r < 16 * kMTiles; r += 2) {
        const int to = from + lane % 16 * 4;
        if (warp * 16 * kMTiles + r >= rows || to >= width) continue;
        const Row at = shared.row[warp * 16 * kMTiles + r];
        const int64_t out = at.i * out_token + at.head * out_head + tile.column + to;
        const bool vector = ((reinterpret_cast<uint64_t>(p.out) + out * bytes) & (4 * bytes - 1)) == 0;
        store_four(p.out, type, out, *reinterpret_cast<const float4*>(staged + r * kOutPitch + lane % 16 * 4), vector);
      }
    }
  }

 private:
  // Writes output of type T from registers, 16 bytes a lane.
  FI_DEVICE void store_as_t(int width) const {
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Row at = shared.row[tile_row(x, half)];
        T* out = static_cast<T*>(p.out) + at.i * p.out_token + at.head * p.out_head + tile.column + lane % 4 * 8;
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 4) {
          unsigned words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = pack_pair(o[x][n + i][half * 2], o[x][n + i][half * 2 + 1], T{});
          const uint4 chunk = transpose_of_four(words);
          if (tile_row(x, half) < tile.rows && n * 8 + lane % 4 * 8 < width) store_global(out + n * 8, chunk);
        }
      }
  }

  // Flags of all steps and of the current step, in one register: a branch should not wait for shared memory.
  struct StepFlags {
    enum Flag {
      kElementwiseK = 1,
      kElementwiseV = 2,
      kTransformed = 4,
      kCustomMask = 8,
      kDimChunks = 16,
      kMasked = 32,  // a row does not see all keys of this step
      kRare = kTransformed | kCustomMask | kDimChunks | kMasked,
      kNewMax = 64,          // compute row_max: in the first step, and where probabilities became large
      kStage = 128,          // of the key addresses of this step
      kPrefetches = 3 << 8,  // the number of prefetch_next() calls that are left
      kFixedOrder = 1024,    // compute row_max in all steps
      kUpdatesMax = kRare | kNewMax | kFixedOrder
    };
    int flags;

    FI_DEVICE static int of(const AttentionProblem& p, const Loader& loader) {
      int flags = kNewMax | 2 << 8;
      if (loader.elementwise(kK)) flags |= kElementwiseK;
      if (loader.elementwise(kV)) flags |= kElementwiseV;
      if (loader.needs_transform()) flags |= kTransformed;
      if (p.mask.selects()) flags |= kCustomMask;
      if (p.head_dim_qk > Shape::kDimQK) flags |= kDimChunks;
      return flags;
    }
    FI_DEVICE bool is(int flag) const { return flags & flag; }
    // opaque: the compiler keeps no copies of former flags.
    FI_DEVICE void set(int flag, bool on) { flags = static_cast<int>(opaque((flags & ~flag) | (on ? flag : 0))); }
    FI_DEVICE int stage() const { return (flags & kStage) != 0; }
    FI_DEVICE bool prefetches() {
      const bool now = flags & kPrefetches;
      if (now) flags -= kPrefetches & -kPrefetches;
      return now;
    }
  };

  template <class Do>
  FI_DEVICE static void for_rows(Do&& act) {  // of a lane
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) act(x, half);
  }
  FI_DEVICE int tile_row(int x, int half) const { return (warp * kMTiles + x) * 16 + half * 8 + lane / 4; }
  FI_DEVICE float& row_max(int x, int half) const { return shared.row_max[2 * x + half][threadIdx.x]; }
  FI_DEVICE float& row_sum(int x, int half) const { return shared.row_sum[2 * x + half][threadIdx.x]; }
  FI_DEVICE int columns() const { return min(kColumns, p.head_dim_vo - tile.column); }
  FI_DEVICE float exponent_scale(int x, int half) const { return shared.exponent_scale[tile_row(x, half)]; }

  FI_DEVICE void clear() {
#pragma unroll
    for (int x = 0; x < kMTiles; ++x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row_max(x, half) = kMinusInf, row_sum(x, half) = 0.f;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[x][n][c] = 0.f;
    }
  }

  FI_DEVICE void load_keys(const StepFlags& flags, int dim, int key, int stage) const {
    loader.template load_tile_async<kK>(flags.is(StepFlags::kElementwiseK), dim, p.head_dim_qk - dim, key,
                                        shared.end_key, stage);
  }
  // Adds the products of the head dim chunks after the first. Their K and Q overwrite those of the first.
  FI_DEVICE void multiply_dim_chunks(Scores& s, const StepFlags& flags, int key, int stage) {
#pragma unroll 1
    for (int dim = Shape::kDimQK; dim < p.head_dim_qk; dim += Shape::kDimQK) {
      __syncthreads();
      loader.stage_q(dim, tile.rows);
      load_keys(flags, dim, key, stage);
      cp_async_wait<0>();
      loader.template finish_load<kK>(flags.is(StepFlags::kElementwiseK), dim, p.head_dim_qk - dim, key, shared.end_key,
                                      stage);
      __syncthreads();
      multiply_qk(s, p.head_dim_qk - dim, [](int) {});
    }
  }

  // s += Q K^T over the columns in shared memory. K fragments are loaded two mma ahead, Q fragments one step of 16
  // columns. between_steps(step): called in the steps of the first 64 columns.
  template <class BetweenSteps>
  FI_DEVICE void multiply_qk(Scores& s, int dims, BetweenSteps&& between_steps) const {
    constexpr int kReads = kKeys / 16, kAll = kReads * Shape::kDimQK / 16, kBuffers = 3;  // of 16 keys
    const unsigned q = Loader::address(shared.q, warp * 16 * kMTiles + lane % 16, lane / 16, Shape::kDimQK);
    const unsigned k = Loader::address(shared.k, lane / 16 * 8 + lane % 8, lane / 8 % 2, Shape::kDimQK);
    unsigned a[2][kMTiles][4], b[kBuffers][4];
    const auto read_queries = [&](int step) {
#pragma unroll
      for (int x = 0; x < kMTiles; ++x)
        ldmatrix_x4(a[step % 2][x], (q ^ step % 4 * 32) + step / 4 * 128 + x * 16 * Shape::kDimQK * 2);
    };
    const auto read_keys = [&](int i) {
      const int step = i / kReads;
      ldmatrix_x4(b[i % kBuffers], (k ^ step % 4 * 32) + step / 4 * 128 + i % kReads * 16 * Shape::kDimQK * 2);
    };
    read_queries(0), read_keys(0), read_keys(1);
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      const int step = i / kReads, n = i % kReads * 2;
      if (i % (4 * kReads) == 0 && i > 0 && step * 16 >= dims) break;
      if (i + 2 < kAll) read_keys(i + 2);
      if (i % kReads == 1 && i + kReads < kAll) read_queries(step + 1);
      if (i % kReads == 0 && step < 4) between_steps(step);
      const unsigned (&now)[4] = b[i % kBuffers];
#pragma unroll
      for (int x = 0; x < kMTiles; ++x) {
        mma_m16n8k16(s[x][n], a[step % 2][x], now[0], now[1], T{});
        mma_m16n8k16(s[x][n + 1], a[step % 2][x], now[2], now[3], T{});
      }
    }
  }

  FI_DEVICE static void clear(Scores& s) {
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int n = 0; n < kN8Tiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[x][n][c] = 0.f;
  }

  // Computes exp2(score - row_max) with the current row_max; no max reduction. Probabilities up to 2^kRescaleThreshold
  // are as exact in 16 bits as those up to 1. If a row's sum shows a larger one, adds no sum and returns false.
  static constexpr float kRescaleThreshold = 8.f, kMaxSum = 2 * kN8Tiles * 256.f;
  FI_DEVICE bool softmax_with_current_max(Scores& s) {
    float sums[kMTiles][2];
    bool small = true;
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = exponent_scale(x, half);
        sums[x][half] = exp2_row(s, x, half, scale, row_max(x, half) * scale);
        small &= sums[x][half] <= kMaxSum;  // NaN: row_max is -inf so far, or a score is infinite
      }
    if (!__all_sync(0xffffffffu, small)) return false;
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum(x, half) += sums[x][half];
    return true;
  }
  FI_DEVICE static float exp2_row(Scores& s, int x, int half, float scale, float reference) {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int n = 0; n < kN8Tiles; ++n) {
      float &y = s[x][n][half * 2], &z = s[x][n][half * 2 + 1];
      y = exp2_approx(fmaf(y, scale, -reference));
      z = exp2_approx(fmaf(z, scale, -reference));
      a += y, b += z;
    }
    return a + b;
  }

  // The same with a max reduction. Rescales row_sum and o where row_max grows by more than kRescaleThreshold. Four
  // lanes share a row, and each has a part of its row_sum.
  FI_DEVICE void update_softmax(Scores& s) {
    float new_max[kMTiles][2];
    bool grown = false;
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float a = kMinusInf, b = kMinusInf;
#pragma unroll
        for (int n = 0; n < kN8Tiles; ++n) a = fmaxf(a, s[x][n][half * 2]), b = fmaxf(b, s[x][n][half * 2 + 1]);
        a = fmaxf(a, b);
        a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
        a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 2));
        const float before = row_max(x, half);
        new_max[x][half] = (a - before) * exponent_scale(x, half) <= kRescaleThreshold ? before : fmaxf(a, before);
        grown |= new_max[x][half] != before;
      }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int x = 0; x < kMTiles; ++x)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float before = row_max(x, half), scale = exponent_scale(x, half);
          const float factor = new_max[x][half] == before ? 1.f : exp2_approx((before - new_max[x][half]) * scale);
          row_max(x, half) = new_max[x][half];
          row_sum(x, half) *= factor;
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) o[x][n][half * 2] *= factor, o[x][n][half * 2 + 1] *= factor;
        }
    }
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = exponent_scale(x, half);
        row_sum(x, half) += exp2_row(s, x, half, scale, softmax_reference(new_max[x][half]) * scale);
      }
  }

  // o += P V. The accumulator layout of two score tiles is the operand layout of one step of 16 keys.
  FI_DEVICE void multiply_pv(const Scores& s, int columns) {
    const unsigned v = Loader::address(shared.v, lane % 16, lane / 16, kColumns);
    unsigned a[kMTiles][kKeys / 16][4];
#pragma unroll
    for (int x = 0; x < kMTiles; ++x)
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          a[x][n][c] = pack_pair(s[x][2 * n + c / 2][c % 2 * 2], s[x][2 * n + c / 2][c % 2 * 2 + 1], T{});
#pragma unroll
    for (int to = 0; to < kColumns; to += 64) {
      if (to > 0 && to >= columns) break;
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          unsigned b[4];
          ldmatrix_x4_trans(b, (v ^ step * 32) + to * 2 + n * 16 * kColumns * 2);
#pragma unroll
          for (int x = 0; x < kMTiles; ++x) {
            mma_m16n8k16(o[x][to / 8 + step * 2], a[x][n], b[0], b[1], T{});
            mma_m16n8k16(o[x][to / 8 + step * 2 + 1], a[x][n], b[2], b[3], T{});
          }
        }
    }
  }
};

}  // namespace fi
