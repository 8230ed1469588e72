// Attention of a tile of packed query rows with mma.sync (sm_80 and later): warps of 16 kM rows, KV tiles of kKeys
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
  static constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kThreads = Shape::kThreads, kRows = Shape::kRows;
  static constexpr int kColumns = Shape::kDimVO, kEights = kKeys / 8;
  using Copies = MmaTileLoader<T, Q, KV, Pages, Shape>;
  using Shared = typename Copies::Shared;
  static constexpr bool kChunks = Shape::kDimQK == 128;  // of head dims beyond it
  using Rare = MmaScoreTransform<Shared, Shape>;
  using Scores = typename Rare::Scores;

  static constexpr int kOutColumns = 64, kOutPitch = kOutColumns + 4;  // of the output in shared memory
  static_assert(sizeof(float) * kRows * kOutPitch <= sizeof(Shared::q) + sizeof(Shared::k) + sizeof(Shared::v),
                "the output takes their place");

  const AttentionProblem& p;
  Shared& shared;
  const QueryTile& tile;
  Copies copies;
  int warp, lane;
  float o[kM][kColumns / 8][4];

  // What is referred to should lie in shared memory: registers are scarce.
  FI_DEVICE MmaAttention(const AttentionProblem& p, Shared& shared, const QueryTile& tile, const Pages& pages)
      : p(p), shared(shared), tile(tile), copies{p, shared, pages}, warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  // ahead(): called by all threads in the first two steps, if there are as many, while copies are on their way.
  template <class Ahead>
  FI_DEVICE void attend(Variant& variant, Ahead&& ahead) {
    // In warps that have nothing else to do yet.
    if (threadIdx.x == 64) shared.flags = Steps::of(p, copies);
    if (threadIdx.x == 96) {
      const int first = p.row(0, tile.first).i, last = p.row(0, tile.first + tile.rows - 1).i;
      shared.begin_key = p.mask.first_key(first), shared.end_key = p.mask.end_key(last);
      shared.full_begin = p.mask.first_key(last), shared.full_end = p.mask.end_key(first);
    }
    clear();
    copies.prepare(tile);
    const int begin = shared.begin_key, end = shared.end_key;
    if (begin >= end) return;
    Steps steps{static_cast<int>(base(shared.flags))};
    const int first_page = copies.page(begin, end);
    copies.stage_q(0, tile.rows);
    copies.locate(first_page, begin, end, 0);
    __syncthreads();
    fetch_keys(steps, 0, begin, 0);
#pragma unroll 1
    for (int key = begin; key < shared.end_key; key += kKeys) {
      steps.set(Steps::kMasked, key < shared.full_begin || key + kKeys > shared.full_end);
      const int stage = steps.stage();
      int page = copies.page(key + kKeys, shared.end_key);
      if (steps.ask()) ahead();
      cp_async_wait<0>();
      copies.template land<kK>(steps.is(Steps::kEachKey), 0, p.head_dim_qk, key, shared.end_key, stage);
      __syncthreads();  // keys are there, and values of the step before have been used
      Scores s;
#pragma unroll 1
      while (true) {
        clear(s);
        // Values are sent for during the products of keys, and where the next keys lie is found out.
        multiply_keys(s, p.head_dim_qk, [&](int step) {
          if (step < Copies::kFetches)
            copies.template fetch<kV>(step, steps.is(Steps::kEachValue), tile.column, columns(), key, shared.end_key,
                                      stage);
          if (step == 3) cp_async_commit(), copies.locate(page, key + kKeys, shared.end_key, stage ^ 1);
        });
        if (Variant::kCustom || steps.is(Steps::kExact) || weigh(s)) break;
        steps.set(Steps::kSearch, true);  // once more, by this warp: the keys still lie there
        page = copies.page(key + kKeys, shared.end_key);
      }
      if (kChunks && steps.is(Steps::kWide)) multiply_more_keys(s, steps, key, stage);
      cp_async_wait<0>();
      copies.template land<kV>(steps.is(Steps::kEachValue), tile.column, columns(), key, shared.end_key, stage);
      __syncthreads();  // values are there, and keys have been used
      steps.set(Steps::kStage, stage == 0);
      if (Variant::kCustom || steps.is(Steps::kRare)) {  // one branch around all that is rare
        if (kChunks && steps.is(Steps::kWide)) copies.stage_q(0, tile.rows);
        const Rare rare{p, shared, tile, warp, lane};
        if constexpr (Variant::kCustom)
          rare.transform(key, shared.end_key, s, variant);
        else if (steps.is(Steps::kFinished))
          rare.finish(key, s);
        if (steps.is(Steps::kSelects)) rare.select(key, s);
        if (!Variant::kCustom && steps.is(Steps::kMasked)) rare.hide(key, s);
      }
      fetch_keys(steps, 0, key + kKeys, steps.stage());
      if (Variant::kSoftmax && (Variant::kCustom || steps.is(Steps::kExact))) soften(s);
      steps.set(Steps::kSearch, false);
      multiply_values(s, columns());
    }
    cp_async_wait<0>();  // the last step sent for keys too, of which there are none
  }

  // Normalises, and writes the rows through shared memory: whole lines, whatever the dtype. sinks: [qo_heads], or null.
  FI_DEVICE void store(Variant& variant, const float* sinks = nullptr) {
    float* const staged = reinterpret_cast<float*>(&shared) + warp * 16 * kM * kOutPitch;  // of this warp's rows
    const OutType type = p.out_type;
    const int bytes = out_bytes(type), rows = tile.rows, width = columns();
    const int64_t out_token = p.out_token, out_head = p.out_head;
    // Each step for all rows, so that none waits for what another one does first.
    float d[kM][2], m[kM][2], factor[kM][2];
    for_rows([&](int x, int half) {
      d[x][half] = sum(x, half), m[x][half] = most(x, half) * exponent_scale(x, half);
      factor[x][half] = p.value_scale(tile.kv_head);
    });
    for_rows([&](int x, int half) { d[x][half] += __shfl_xor_sync(0xffffffffu, d[x][half], 1); });
    for_rows([&](int x, int half) { d[x][half] += __shfl_xor_sync(0xffffffffu, d[x][half], 2); });
    if (sinks) {
      for_rows([&](int x, int half) {
        factor[x][half] *= add_sink<CudaMath>(sinks[shared.row[place(x, half)].head], m[x][half], d[x][half]);
      });
    }
    for_rows([&](int x, int half) {
      const auto output = variant.end(shared.row[place(x, half)], m[x][half], d[x][half], factor[x][half]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int c = half * 2; c < half * 2 + 2; ++c) o[x][n][c] = output(o[x][n][c]);
    });
    if (p.lse && tile.column == 0 && lane % 4 == 0) {
      for_rows([&](int x, int half) {
        const Row at = shared.row[place(x, half)];
        if (place(x, half) < rows)
          p.lse[static_cast<int64_t>(at.i) * p.qo_heads + at.head] = softmax_lse<CudaMath>(m[x][half], d[x][half]);
      });
    }
    constexpr OutType kOwn = IsHalf<T>::value ? OutType::kF16 : OutType::kBF16;
    const auto alignment = reinterpret_cast<uint64_t>(p.out) | (out_token | out_head) * sizeof(T);
    if (type == kOwn && alignment % 16 == 0) return store_own(width);
    const int lane = static_cast<int>(base(threadIdx.x)) % 32;  // nothing is kept for this over the steps
    __syncthreads();
#pragma unroll
    for (int from = 0; from < kColumns; from += kOutColumns) {
      if (from >= columns()) break;
      __syncwarp();
#pragma unroll
      for (int x = 0; x < kM; ++x)
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
      for (int r = lane / 16; r < 16 * kM; r += 2) {
        const int to = from + lane % 16 * 4;
        if (warp * 16 * kM + r >= rows || to >= width) continue;
        const Row at = shared.row[warp * 16 * kM + r];
        const int64_t out = at.i * out_token + at.head * out_head + tile.column + to;
        const bool vector = ((reinterpret_cast<uint64_t>(p.out) + out * bytes) & (4 * bytes - 1)) == 0;
        store_four(p.out, type, out, *reinterpret_cast<const float4*>(staged + r * kOutPitch + lane % 16 * 4), vector);
      }
    }
  }

 private:
  // Output of T, straight from registers: 16 bytes a lane.
  FI_DEVICE void store_own(int width) const {
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Row at = shared.row[place(x, half)];
        T* out = static_cast<T*>(p.out) + at.i * p.out_token + at.head * p.out_head + tile.column + lane % 4 * 8;
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 4) {
          unsigned words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = pack_pair(o[x][n + i][half * 2], o[x][n + i][half * 2 + 1], T{});
          const uint4 piece = transpose_of_four(words);
          if (place(x, half) < tile.rows && n * 8 + lane % 4 * 8 < width) store_global(out + n * 8, piece);
        }
      }
  }

  // What steps have in common, and what one of them is, in one register: a branch should not wait for memory.
  struct Steps {
    enum Flag {
      kEachKey = 1,
      kEachValue = 2,
      kFinished = 4,
      kSelects = 8,
      kWide = 16,
      kMasked = 32,  // in this step there are keys that a row does not see
      kRare = kFinished | kSelects | kWide | kMasked,
      kSearch = 64,  // for new maxima: in the first step, and where weights turned out to be large
      kExact = kRare | kSearch,
      kStage = 128,  // of the addresses of this step's keys
      kAsk = 3 << 8  // how often to ask ahead
    };
    int flags;

    FI_DEVICE static int of(const AttentionProblem& p, const Copies& copies) {
      int flags = kSearch | 2 << 8;
      if (copies.each(kK)) flags |= kEachKey;
      if (copies.each(kV)) flags |= kEachValue;
      if (copies.finished()) flags |= kFinished;
      if (p.mask.selects()) flags |= kSelects;
      if (p.head_dim_qk > Shape::kDimQK) flags |= kWide;
      return flags;
    }
    FI_DEVICE bool is(int flag) const { return flags & flag; }
    // base: the compiler keeps no copies of what flags were before.
    FI_DEVICE void set(int flag, bool on) { flags = static_cast<int>(base((flags & ~flag) | (on ? flag : 0))); }
    FI_DEVICE int stage() const { return (flags & kStage) != 0; }
    FI_DEVICE bool ask() {
      const bool now = flags & kAsk;
      if (now) flags -= kAsk & -kAsk;
      return now;
    }
  };

  template <class Do>
  FI_DEVICE static void for_rows(Do&& act) {  // of a lane
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) act(x, half);
  }
  FI_DEVICE int place(int x, int half) const { return (warp * kM + x) * 16 + half * 8 + lane / 4; }  // in the tile
  FI_DEVICE float& most(int x, int half) const { return shared.most[2 * x + half][threadIdx.x]; }
  FI_DEVICE float& sum(int x, int half) const { return shared.sums[2 * x + half][threadIdx.x]; }
  FI_DEVICE int columns() const { return min(kColumns, p.head_dim_vo - tile.column); }
  FI_DEVICE float exponent_scale(int x, int half) const { return shared.exponent[place(x, half)]; }

  FI_DEVICE void clear() {
#pragma unroll
    for (int x = 0; x < kM; ++x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) most(x, half) = kMinusInf, sum(x, half) = 0.f;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[x][n][c] = 0.f;
    }
  }

  FI_DEVICE void fetch_keys(const Steps& steps, int dim, int key, int stage) const {
    copies.template fetch_all<kK>(steps.is(Steps::kEachKey), dim, p.head_dim_qk - dim, key, shared.end_key, stage);
  }
  // The dimensions beyond the first ones, in their place, as those of queries.
  FI_DEVICE void multiply_more_keys(Scores& s, const Steps& steps, int key, int stage) {
#pragma unroll 1
    for (int dim = Shape::kDimQK; dim < p.head_dim_qk; dim += Shape::kDimQK) {
      __syncthreads();
      copies.stage_q(dim, tile.rows);
      fetch_keys(steps, dim, key, stage);
      cp_async_wait<0>();
      copies.template land<kK>(steps.is(Steps::kEachKey), dim, p.head_dim_qk - dim, key, shared.end_key, stage);
      __syncthreads();
      multiply_keys(s, p.head_dim_qk - dim, [](int) {});
    }
  }

  // s += q k over the staged dimensions. Keys are read two products ahead, queries one step of 16 dimensions.
  // beside(step): what else is done meanwhile, in the steps of the first 64 dimensions.
  template <class Beside>
  FI_DEVICE void multiply_keys(Scores& s, int dims, Beside&& beside) const {
    constexpr int kReads = kKeys / 16, kAll = kReads * Shape::kDimQK / 16, kBuffers = 3;  // of 16 keys
    const unsigned q = Copies::address(shared.q, warp * 16 * kM + lane % 16, lane / 16, Shape::kDimQK);
    const unsigned k = Copies::address(shared.k, lane / 16 * 8 + lane % 8, lane / 8 % 2, Shape::kDimQK);
    unsigned a[2][kM][4], b[kBuffers][4];
    const auto read_queries = [&](int step) {
#pragma unroll
      for (int x = 0; x < kM; ++x)
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
      if (i % kReads == 0 && step < 4) beside(step);
      const unsigned (&now)[4] = b[i % kBuffers];
#pragma unroll
      for (int x = 0; x < kM; ++x) {
        mma_m16n8k16(s[x][n], a[step % 2][x], now[0], now[1], T{});
        mma_m16n8k16(s[x][n + 1], a[step % 2][x], now[2], now[3], T{});
      }
    }
  }

  FI_DEVICE static void clear(Scores& s) {
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[x][n][c] = 0.f;
  }

  // Scores become weights relative to the maxima there are, of which a row's scores may be up to 2^kRoom times as
  // large: in 16 bits those are as exact as weights up to 1. Sums tell whether any is larger; then they are not added,
  // and the answer is false.
  static constexpr float kRoom = 8.f, kLargestSum = 2 * kEights * 256.f;
  FI_DEVICE bool weigh(Scores& s) {
    float sums[kM][2];
    bool small = true;
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = exponent_scale(x, half);
        sums[x][half] = weigh_row(s, x, half, scale, most(x, half) * scale);
        small &= sums[x][half] <= kLargestSum;  // NaN: without a key so far, or of an infinite score
      }
    if (!__all_sync(0xffffffffu, small)) return false;
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum(x, half) += sums[x][half];
    return true;
  }
  FI_DEVICE static float weigh_row(Scores& s, int x, int half, float scale, float base) {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      float &y = s[x][n][half * 2], &z = s[x][n][half * 2 + 1];
      y = exp2_approx(fmaf(y, scale, -base));
      z = exp2_approx(fmaf(z, scale, -base));
      a += y, b += z;
    }
    return a + b;
  }

  // The same with new maxima where they have grown by more than 2^kRoom, which sums and o take too. Four lanes share a
  // row, of whose sum each has a part.
  FI_DEVICE void soften(Scores& s) {
    float top[kM][2];
    bool grown = false;
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float a = kMinusInf, b = kMinusInf;
#pragma unroll
        for (int n = 0; n < kEights; ++n) a = fmaxf(a, s[x][n][half * 2]), b = fmaxf(b, s[x][n][half * 2 + 1]);
        a = fmaxf(a, b);
        a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
        a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 2));
        const float before = most(x, half);
        top[x][half] = (a - before) * exponent_scale(x, half) <= kRoom ? before : fmaxf(a, before);
        grown |= top[x][half] != before;
      }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int x = 0; x < kM; ++x)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float before = most(x, half), scale = exponent_scale(x, half);
          const float factor = top[x][half] == before ? 1.f : exp2_approx((before - top[x][half]) * scale);
          most(x, half) = top[x][half];
          sum(x, half) *= factor;
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) o[x][n][half * 2] *= factor, o[x][n][half * 2 + 1] *= factor;
        }
    }
#pragma unroll
    for (int x = 0; x < kM; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = exponent_scale(x, half);
        sum(x, half) += weigh_row(s, x, half, scale, softmax_reference(top[x][half]) * scale);
      }
  }

  // o += weights v. The accumulator layout of two score tiles is the operand layout of one step of 16 keys.
  FI_DEVICE void multiply_values(const Scores& s, int columns) {
    const unsigned v = Copies::address(shared.v, lane % 16, lane / 16, kColumns);
    unsigned a[kM][kKeys / 16][4];
#pragma unroll
    for (int x = 0; x < kM; ++x)
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
          for (int x = 0; x < kM; ++x) {
            mma_m16n8k16(o[x][to / 8 + step * 2], a[x][n], b[0], b[1], T{});
            mma_m16n8k16(o[x][to / 8 + step * 2 + 1], a[x][n], b[2], b[3], T{});
          }
        }
    }
  }
};

}  // namespace fi
