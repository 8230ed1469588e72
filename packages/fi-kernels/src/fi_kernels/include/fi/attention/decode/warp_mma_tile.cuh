// The mma tile of one warp in decode: up to 16 packed query rows against 16 or 32 keys at a time, which no other warp
// reads; row_max, row_sum and output stay in registers. sm_80 and later.
#pragma once
#include "fi/attention/decode/batch_decode.h"
#include "fi/attention/vec8.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/swizzle.cuh"

namespace fi {

// Keys in shared memory: lines of 128 bytes in the 128-byte swizzle, so that ldmatrix on consecutive lines has no bank
// conflicts. A box of 2^shift keys has the first line of all its keys, then the second.
template <int kLines, int kKeys>
struct SwizzledKvTile {
  static constexpr int kBytes = kLines * kKeys * 128;
  int shift;
  FI_DEVICE unsigned offset(int key, int piece) const {
    int line = key;
    if constexpr (kLines > 1) {
      const int box = key >> shift;
      line = ((box * kLines + piece / 8) << shift) + (key - (box << shift));
    }
    return swizzled_offset(line, piece % 8);
  }
};

// Orders plain stores to shared memory before a later bulk copy to the same address.
FI_DEVICE void fence_before_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// T: what tensor cores multiply. fp8 keys become halves in registers. ldmatrix gives a lane four neighbours of a row of
// fp8 where the operand wants two here and two eight columns on, so the columns of a step of 16 are taken in another
// order: 4c, 4c + 1 in the place of 2c, 2c + 1, and 4c + 2, 4c + 3 in that of 2c + 8, 2c + 9. q follows the same order.
// kKeys: 16, or 32, which shares the latency of a step between twice the keys.
template <class T, class Q, class KV, int kDim, class Lines, int kKeys = 16>
struct WarpMmaTile {
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kSixteens = kKeys / 16, kEights = kKeys / 8;
  static constexpr int kSteps = kDim / 16, kPieces = kDim * sizeof(KV) / 16, kLines = (kPieces + 7) / 8;
  static constexpr int kPitch = kDim + 16 / sizeof(Q);  // of rows of queries in shared memory
  static constexpr bool kHeld = kDim <= 128;  // queries stay in registers, else each step loads them from shared memory

  unsigned q[kHeld ? kSteps : 1][4];
  float o[kDim / 8][4], m[2], d[2];
  float scale[2], slope[2];  // of the lane's two rows
  int first;                 // packed row
  int full_begin, full_end;  // keys that every row attends to
  bool special;              // scores need more than a scale
  const Lines lines;
  const int lane, place;  // of the first key in what lines hold
  // The offset of the lane's row of an even piece, for each line and sixteen keys; other pieces differ in three bits.
  unsigned k_row[kSixteens][kLines], v_row[kSixteens][kLines];

  FI_DEVICE WarpMmaTile(Lines lines, int place) : lines(lines), lane(threadIdx.x % 32), place(place) {
#pragma unroll
    for (int i = 0; i < kSixteens; ++i)
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        k_row[i][line] = lines.offset(place + i * 16 + lane / 16 * 8 + lane % 8, line * 8 + lane / 8 % 2);
        v_row[i][line] = lines.offset(place + i * 16 + lane % 16, line * 8 + lane / 16);
      }
  }

  // rows: of the tile; queries: its row r at r * kPitch, in shared memory, until the end of the work tile.
  FI_DEVICE void begin(const BatchDecodeParams& params, const AttentionProblem& p, int kv_head, int first_row, int rows,
                       const Q* queries) {
    first = first_row;
    special = p.scores.soft_cap > 0.f || p.scores.alibi;
    full_begin = p.mask.first_key(params.row(kv_head, first + rows - 1).i);
    full_end = p.mask.end_key(params.row(kv_head, first).i);
    if (p.mask.draft) full_end = min(full_end, p.mask.kv_len - p.mask.qo_len);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) o[n][c] = 0.f;
    const Row row = params.row(kv_head, first + max(min(lane % 16, rows - 1), 0));
    const HeadScores head = p.head_scores<CudaMath>(row.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // each lane computes one row, then exchanges: half the code
      const int from = half * 8 + lane / 4;
      scale[half] = __shfl_sync(0xffffffffu, head.scale, from),
      slope[half] = __shfl_sync(0xffffffffu, head.slope, from);
      m[half] = kMinusInf, d[half] = 0.f;
    }
    if constexpr (kHeld) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_query(queries, step, q[step]);
    }
  }

  // Whether scores of keys [key, key + kKeys) need no more than a scale, and all rows see all of them.
  FI_DEVICE bool plain(int key, int low, int high) const {
    return !special && key >= max(full_begin, low) && key + kKeys <= min(full_end, high);
  }

  // Keys [key, key + kKeys), which lie at `k` and `v` from `place` on; those outside of [low, high)
  // are not there, and what lies in their place may be anything. problem() gives the attention problem of the request:
  // where it is rarely asked for, it must not lie in registers. kPlain: they are keys of `plain`, for which the code
  // lies in one piece, without jumps over what is rarely needed.
  template <bool kPlain, class Problem, class WaitForValues>
  FI_DEVICE void attend(Problem&& problem, const Q* queries, const char* k, char* v, int key, int low, int high,
                        WaitForValues&& wait_for_values) {
    float s[kEights][4] = {}, odd[kEights][4] = {};  // two sums each: half the latency of a chain of products
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += 2) {
      constexpr int kStepsOfPair = kFp8 ? 2 : 1;
      unsigned a[kStepsOfPair][4];
#pragma unroll
      for (int x = 0; x < kStepsOfPair; ++x)
        if (piece + x < kPieces) query(queries, piece * kStepsOfPair / 2 + x, a[x]);
#pragma unroll
      for (int sixteen = 0; sixteen < kSixteens; ++sixteen) {
        unsigned b[4];
        ldmatrix_x4(b, k + (k_row[sixteen][piece / 8] ^ piece % 8 << 4));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = sixteen * 2 + half;
          if constexpr (kFp8) {
#pragma unroll
            for (int x = 0; x < 2 && piece + x < kPieces; ++x)
              mma_m16n8k16(x ? odd[n] : s[n], a[x], halves(b[2 * half + x], KV{}), upper_halves(b[2 * half + x], KV{}),
                           T{});
          } else {
            mma_m16n8k16(piece % 4 ? odd[n] : s[n], a[0], b[2 * half], b[2 * half + 1], T{});
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = (s[n][c] + odd[n][c]) * scale[c / 2];
    if (!kPlain && special) finish(problem(), key, s);
    if (!kPlain && (key < max(full_begin, low) || key + kKeys > min(full_end, high))) {
      const AttentionProblem p = problem();
      const Mask& mask = p.mask;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned seen = mask.seen(token(p, half), key, low, high) >> lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (!(seen >> (n * 8 + c) & 1)) s[n][half * 2 + c] = kMinusInf;
      }
    }
    soften(s);
    wait_for_values();
    if (!kPlain && (key < low || key + kKeys > high)) clear(v, low - key, high - key);
#pragma unroll
    for (int sixteen = 0; sixteen < kSixteens; ++sixteen) {
      const float (&left)[4] = s[sixteen * 2], (&right)[4] = s[sixteen * 2 + 1];
      const unsigned a[4] = {pack_pair(left[0], left[1], T{}), pack_pair(left[2], left[3], T{}),
                             pack_pair(right[0], right[1], T{}), pack_pair(right[2], right[3], T{})};
#pragma unroll
      for (int piece = 0; piece < kPieces; piece += 2) {
        unsigned b[4];
        ldmatrix_x4_trans(b, v + (v_row[sixteen][piece / 8] ^ piece % 8 << 4));
        if constexpr (kFp8) {
#pragma unroll
          for (int x = 0; x < 2 && piece + x < kPieces; ++x) {  // 16 columns: the even ones, the odd ones
            const unsigned low_keys = __byte_perm(b[2 * x], 0, 0x3120);
            const unsigned high_keys = __byte_perm(b[2 * x + 1], 0, 0x3120);
            mma_m16n8k16(o[2 * (piece + x)], a, halves(low_keys, KV{}), halves(high_keys, KV{}), T{});
            mma_m16n8k16(o[2 * (piece + x) + 1], a, upper_halves(low_keys, KV{}), upper_halves(high_keys, KV{}), T{});
          }
        } else {
          mma_m16n8k16(o[piece], a, b[0], b[1], T{});
          mma_m16n8k16(o[piece + 1], a, b[2], b[3], T{});
        }
      }
    }
  }

  // Leaves rows of unnormalised output, `pitch` floats apart, and their states (m, d).
  FI_DEVICE void leave(int rows, float* to, int pitch, float2* states) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = half * 8 + lane / 4;
      float sum = d[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (r >= rows) continue;
      if (lane % 4 == 0) states[r] = make_float2(m[half], sum);
      float* row = to + r * pitch;
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        const float *x = &o[n][half * 2], *y = &o[n + 1][half * 2];
        if constexpr (kFp8) {
          *reinterpret_cast<float4*>(row + n * 8 + lane % 4 * 4) = make_float4(x[0], y[0], x[1], y[1]);
        } else {
          *reinterpret_cast<float2*>(row + n * 8 + lane % 4 * 2) = make_float2(x[0], x[1]);
          *reinterpret_cast<float2*>(row + n * 8 + 8 + lane % 4 * 2) = make_float2(y[0], y[1]);
        }
      }
    }
  }

 private:
  // The query token of the lane's row, needed so seldom that it is not kept.
  FI_DEVICE int token(const AttentionProblem& p, int half) const {
    return min(p.row(0, first + half * 8 + lane / 4).i, p.mask.qo_len - 1);
  }
  // The operand of one step of 16 columns.
  FI_DEVICE void load_query(const Q* queries, int step, unsigned (&a)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Q* at = queries + (half * 8 + lane / 4) * kPitch + step * 16 + lane % 4 * (kFp8 ? 4 : 2);
      a[half] = query_pair(at);
      a[half + 2] = query_pair(at + (kFp8 ? 2 : 8));
    }
  }
  FI_DEVICE void query(const Q* queries, int step, unsigned (&a)[4]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int x = 0; x < 4; ++x) a[x] = q[step][x];
    } else {
      load_query(queries, step, a);
    }
  }
  FI_DEVICE static unsigned query_pair(const Q* at) {
    if constexpr (sizeof(Q) == 1) {
      return halves(*reinterpret_cast<const unsigned short*>(at), Q{});
    } else if constexpr (kFp8) {
      return pack_pair(to_float(at[0]), to_float(at[1]), T{});
    } else {
      return *reinterpret_cast<const unsigned*>(at);
    }
  }

  // Soft cap and ALiBi.
  FI_DEVICE void finish(const AttentionProblem& p, int key, float (&s)[kEights][4]) const {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int j = key + n * 8 + lane % 4 * 2 + c % 2, row = token(p, c / 2);
        const HeadScores head{scale[c / 2], p.scores.cap(), slope[c / 2]};
        s[n][c] = head.template score<CudaMath>(s[n][c], static_cast<float>(j - row));
      }
  }

  // Scores become weights; m, d and o take the new maximum. Four lanes share a row.
  FI_DEVICE void soften(float (&s)[kEights][4]) {
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = m[half];
#pragma unroll
      for (int n = 0; n < kEights; ++n) top[half] = fmaxf(top[half], fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
    }
    if (__any_sync(0xffffffffu, top[0] > m[0] || top[1] > m[1])) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = softmax_exp2<CudaMath>(m[half], softmax_reference(top[half]));
        m[half] = top[half];
        d[half] *= factor;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) o[n][half * 2] *= factor, o[n][half * 2 + 1] *= factor;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = softmax_reference(m[half]);
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int c = half * 2; c < half * 2 + 2; ++c) {
          s[n][c] = softmax_exp2<CudaMath>(s[n][c], base);
          d[half] += s[n][c];
        }
    }
  }

  // Values outside of keys [begin, end) of those at `place`: a weight of 0 does not hide a NaN.
  FI_DEVICE void clear(char* v, int begin, int end) const {
#pragma unroll 1
    for (int at = lane; at < kKeys * kPieces; at += 32) {
      const int key = at / kPieces, piece = at % kPieces;
      if (key < begin || key >= end)
        *reinterpret_cast<uint4*>(v + lines.offset(place + key, piece)) = make_uint4(0, 0, 0, 0);
    }
    fence_before_async();
    __syncwarp();
  }
};

}  // namespace fi
