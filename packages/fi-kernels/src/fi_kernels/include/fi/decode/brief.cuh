// A segment of few keys, all of which are in shared memory at once: short calls, whose time is that of reading code.
#pragma once
#include "fi/attention/pages.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/decode/finish.cuh"
#include "fi/decode/warp_tile.cuh"

#ifndef FI_LOAD_UNROLL
#define FI_LOAD_UNROLL 2
#endif
#ifndef FI_SCORE_UNROLL
#define FI_SCORE_UNROLL 1
#endif
#ifndef FI_SUM_UNROLL
#define FI_SUM_UNROLL 1
#endif
#ifndef FI_BRIEF
#define FI_BRIEF 256
#endif

namespace fi {

// Code that no call has run lately comes from DRAM, and the more the later: H200, 0.3 us for a KB. So every step is
// there once, in a loop that is not unrolled, and each warp takes a part of the dimensions of the values, since then
// there is nothing to merge in the block. kKeys: the most of a segment.
template <class T, class Q, class KV, int kDim, int kKeys, class Team = FinishTeam<16>>
struct BriefDecode {
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kPieces = kDim * sizeof(KV) / 16, kPairs = (kPieces / 2 + kWarps - 1) / kWarps;  // pairs of a warp
  static constexpr bool kPossible = kPieces % 2 == 0;
  static constexpr int kLoadUnroll = FI_LOAD_UNROLL, kScoreUnroll = FI_SCORE_UNROLL, kSumUnroll = FI_SUM_UNROLL;
  static constexpr int kLineBytes = 16 * 128;  // one line of each of 16 keys
  using Lines = KeyLines<(kPieces + 7) / 8, kKeys>;

  struct Place {
    int64_t k, v;
  };
  struct alignas(16) Shared {
    union {
      char k[Lines::kBytes];
      float output[kDecodeRows][kDim + 8];
    };
    char v[Lines::kBytes];
    T queries[kDecodeRows][kDim + 8];
    float scores[kDecodeRows][kKeys + 4];  // then weights, as T, at the beginning of each row
    Place places[kKeys];
    float2 states[kDecodeRows];
    float scales[kDecodeRows];
    int last;
  };

  const BatchDecodeParams& params;
  Shared& shared;

  // Whether the walk has one segment only, of so few keys, whose scores need no more than a scale.
  FI_DEVICE static bool takes(const BatchDecodeParams& params, DecodeWalk walk, DecodeSegment& s) {
    const AttentionProblem& p = params.problem;
    if (!kPossible || walk.header.tiles > params.blocks * (kKeys / kDecodeTile + kItemCost)) return false;
    if (p.special() || p.mask.qo_len > 1 || p.mask.window_left >= 0 || params.draft_mask || walk.header.later > 0)
      return false;
    return walk.next(s) && walk.done() && (s.end - s.begin) * kDecodeTile <= kKeys;
  }

  FI_DEVICE void meet() const { barrier_sync(1, kThreads); }

  // By the first threads of the block.
  FI_DEVICE void run(const DecodeSegment& s) const {
    const Finish finish(params, s, kDim);
    const int first = s.begin * kDecodeTile;
    const int count = max(params.end_key(s) - first, 0);
    load_keys(finish, first, count);
    load_queries(finish);
    cp_async_wait<0>();
    meet();
    score(count);
    meet();
    weigh(finish.rows, count);
    meet();
    sum(count);
    meet();
    Team team{static_cast<int>(threadIdx.x), kThreads, 1, &shared.last};
    finish.finish(
        team,
        [&](int r, int x) {
          const float2 state = shared.states[r];
          return RowPart{state.x, state.y, *reinterpret_cast<const float4*>(&shared.output[r][x])};
        },
        [] {}, [&](int r, int x, const RowPart& values) { finish.write(r, x, values); });
  }

  FI_DEVICE void load_keys(const Finish& finish, int first, int count) const {
    const AttentionProblem& p = params.problem;
    const PagedTokens tokens{params.page_indices + finish.s.first_page, params.page_size, 0, 0};
#pragma unroll
    for (int key = threadIdx.x; key < kKeys; key += kThreads) {
      if (key >= count) break;
      const int64_t page = tokens.page(first + key), slot = tokens.slot(first + key);
      shared.places[key] = {page * params.k_page + slot * p.k_token + finish.kv_head * p.k_head,
                            page * params.v_page + slot * p.v_token + finish.kv_head * p.v_head};
    }
    meet();
#pragma unroll kLoadUnroll
    for (int i = threadIdx.x; i < (count + 15) / 16 * 16 * kPieces; i += kThreads) {
      const int key = i / kPieces, piece = i % kPieces;
      const bool inside = key < count;
      const Place place = shared.places[inside ? key : 0];
      const unsigned to = Lines{4}.offset(key, piece);
      cp_async_16(shared.k + to, reinterpret_cast<const char*>(static_cast<const KV*>(p.k) + place.k) + piece * 16, inside);
      cp_async_16(shared.v + to, reinterpret_cast<const char*>(static_cast<const KV*>(p.v) + place.v) + piece * 16, inside);
    }
    cp_async_commit();
  }

  // As T; of fp8 keys in the order of WarpTile.
  FI_DEVICE void load_queries(const Finish& finish) const {
    const float bmm1 = params.bmm1_scale ? *params.bmm1_scale : 1.f;
    const AttentionProblem p = params.keys_of(finish.s.request, finish.s.kv_len, bmm1);
    if (threadIdx.x < finish.rows) {
      const Row row = params.row(finish.kv_head, finish.first + threadIdx.x);
      shared.scales[threadIdx.x] = p.head_scores<CudaMath>(row.head).scale;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < finish.rows * (kDim / 8); i += kThreads) {
      const int r = i / (kDim / 8), eighth = i % (kDim / 8);
      const Row row = params.row(finish.kv_head, finish.first + r);
      const int64_t token = params.first_token(finish.s.request) + row.i;
      Eight<Q> eight;
      eight.read(static_cast<const Q*>(p.q) + token * p.q_token + row.head * p.q_head + eighth * 8, true);
      T* to = &shared.queries[r][eighth * 8];
      if constexpr (kFp8) {
        float x[8];
        eight.floats(x);
        to = &shared.queries[r][eighth / 2 * 16 + eighth % 2 * 4];
        *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair(x[0], x[1], T{}), pack_pair(x[4], x[5], T{}));
        *reinterpret_cast<uint2*>(to + 8) = make_uint2(pack_pair(x[2], x[3], T{}), pack_pair(x[6], x[7], T{}));
      } else {
        memcpy(to, &eight, sizeof eight);
      }
    }
  }

  // Each warp takes every fourth sixteen of keys.
  FI_DEVICE void score(int count) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int key = threadIdx.x / 32 * 16; key < count; key += kWarps * 16) {
      const unsigned row = Lines{4}.offset(key + lane / 16 * 8 + lane % 8, lane / 8 % 2);
      const T* queries = &shared.queries[lane % 16][lane / 16 * 8];
      float s[2][4] = {};
#pragma unroll kScoreUnroll
      for (int piece = 0; piece < kPieces; piece += 2) {
        unsigned b[4];
        ldmatrix_x4(b, shared.k + (row ^ piece % 8 << 4) + piece / 8 * kLineBytes);
#pragma unroll
        for (int x = 0; x < (kFp8 ? 2 : 1); ++x) {
          unsigned a[4];
          ldmatrix_x4(a, queries);
          queries += 16;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if constexpr (kFp8)
              mma_m16n8k16(s[half], a, halves(b[2 * half + x], KV{}), upper_halves(b[2 * half + x], KV{}), T{});
            else
              mma_m16n8k16(s[half], a, b[2 * half], b[2 * half + 1], T{});
          }
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<float2*>(&shared.scores[half * 8 + lane / 4][key + n * 8 + lane % 4 * 2]) =
              make_float2(s[n][half * 2], s[n][half * 2 + 1]);
    }
  }

  FI_DEVICE T* weights(int r) const { return reinterpret_cast<T*>(shared.scores[r]); }

  // Scores of each row become weights.
  FI_DEVICE void weigh(int rows, int count) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < rows; r += kWarps) {
      float s[kKeys / 32], top = kMinusInf, d = 0.f;
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const int key = i * 32 + lane;
        s[i] = key < count ? shared.scores[r][key] * shared.scales[r] : kMinusInf;
        top = fmaxf(top, s[i]);
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
      const float base = softmax_base(top);
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const float weight = softmax_weight<CudaMath>(s[i], base);
        weights(r)[i * 32 + lane] = from_float<T>(weight);
        d += weight;
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) d += __shfl_xor_sync(0xffffffffu, d, distance);
      if (lane == 0) shared.states[r] = make_float2(top, d);
    }
  }

  // Whether a warp has an i-th pair of pieces of values.
  FI_DEVICE static bool has(int warp, int i) { return (i + 1) * kWarps * 2 <= kPieces || (warp + i * kWarps) * 2 < kPieces; }

  // Each warp takes some of the dimensions, over all keys.
  FI_DEVICE void sum(int count) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int kTiles = kFp8 ? 4 : 2;  // of 8 columns, of a pair of pieces
    float o[kPairs][kTiles][4] = {};
#pragma unroll kSumUnroll
    for (int key = 0; key < count; key += 16) {
      unsigned a[4];
      ldmatrix_x4(a, weights(lane % 16) + key + lane / 16 * 8);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (!has(warp, i)) continue;
        unsigned b[4];
        ldmatrix_x4_trans(b, shared.v + Lines{4}.offset(key + lane % 16, (warp + i * kWarps) * 2 + lane / 16));
        if constexpr (kFp8) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const unsigned low = __byte_perm(b[2 * x], 0, 0x3120), high = __byte_perm(b[2 * x + 1], 0, 0x3120);
            mma_m16n8k16(o[i][2 * x], a, halves(low, KV{}), halves(high, KV{}), T{});
            mma_m16n8k16(o[i][2 * x + 1], a, upper_halves(low, KV{}), upper_halves(high, KV{}), T{});
          }
        } else {
          mma_m16n8k16(o[i][0], a, b[0], b[1], T{});
          mma_m16n8k16(o[i][1], a, b[2], b[3], T{});
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!has(warp, i)) continue;
        float* to = &shared.output[half * 8 + lane / 4][(warp + i * kWarps) * (kFp8 ? 32 : 16)];
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
          const float *x = &o[i][n][half * 2], *y = &o[i][n + 1][half * 2];
          if constexpr (kFp8) {
            *reinterpret_cast<float4*>(to + n * 8 + lane % 4 * 4) = make_float4(x[0], y[0], x[1], y[1]);
          } else {
            *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) = make_float2(x[0], x[1]);
            *reinterpret_cast<float2*>(to + n * 8 + 8 + lane % 4 * 2) = make_float2(y[0], y[1]);
          }
        }
      }
  }
};

// The most keys of a segment that so much shared memory holds.
template <class T, class Q, class KV, int kDim>
FI_HOST_DEVICE constexpr int brief_keys(int bytes) {
  if (!BriefDecode<T, Q, KV, kDim, 64>::kPossible) return 0;
  int keys = 0;
  if (sizeof(typename BriefDecode<T, Q, KV, kDim, 64>::Shared) <= bytes) keys = 64;
  if (sizeof(typename BriefDecode<T, Q, KV, kDim, 128>::Shared) <= bytes) keys = 128;
  if (sizeof(typename BriefDecode<T, Q, KV, kDim, 256>::Shared) <= bytes) keys = 256;
  return keys < FI_BRIEF ? keys : FI_BRIEF;
}

}  // namespace fi
