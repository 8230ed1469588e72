// The mma tile of one warp in decode: up to 16 packed query rows against 16 or 32 keys at a time, which no other warp
// reads; row_max, row_sum and output stay in registers. sm_80 and later.
#pragma once
#include "fi/attention/decode/batch_decode.h"
#include "fi/attention/vec8.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/mbarrier_sm90.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/swizzle.cuh"

namespace fi {

// Keys in shared memory: lines of 128 bytes in the 128-byte swizzle, so that ldmatrix on consecutive lines has no bank
// conflicts. A box of 2^shift keys has the first line of all its keys, then the second.
template <int kLines, int kKeys>
struct SwizzledKvTile {
  static constexpr int kBytes = kLines * kKeys * 128;
  int shift;
  FI_DEVICE unsigned offset(int key, int chunk) const {
    int line = key;
    if constexpr (kLines > 1) {
      const int box = key >> shift;
      line = ((box * kLines + chunk / 8) << shift) + (key - (box << shift));
    }
    return swizzled_offset(line, chunk % 8);
  }
};

// NVFP4 keys in shared memory: rows of 32, 64 or 128 bytes, in the swizzle of as many bytes, with the same effect.
template <int kRowBytes, int kKeys>
struct PackedKvTile {
  static constexpr int kBytes = kRowBytes * kKeys;
  int shift;
  FI_DEVICE unsigned offset(int key, int chunk) const {
    const int row = key * kRowBytes;
    return row + ((chunk ^ (row >> 7 & (kRowBytes / 16 - 1))) << 4);
  }
  FI_DEVICE unsigned value_offset(int key, int chunk) const { return offset(key, chunk); }
};

// The same of keys and values together: a box of 2^shift tokens has those of its keys, then those of its values, or the
// other way round, and with several kv heads those of each head. One TMA copy may load all. Key t of head h is key
// h * kTokens + t of the tile.
template <int kRowBytes, int kKeys, int kHeads>
struct JoinedKvTile {
  static constexpr int kBytes = kRowBytes * kKeys;  // of the keys
  static constexpr int kTokens = kKeys / kHeads;
  int shift;
  bool values_first;
  FI_DEVICE unsigned offset(int key, int chunk) const { return part(key, chunk, values_first); }
  FI_DEVICE unsigned value_offset(int key, int chunk) const { return part(key, chunk, !values_first); }

 private:
  FI_DEVICE unsigned part(int key, int chunk, bool second) const {
    const int head = kHeads > 1 ? key / kTokens : 0, token = key - head * kTokens, box = token >> shift;
    return PackedKvTile<kRowBytes, kKeys>{shift}.offset(token + ((2 * (box * kHeads + head) + second - box) << shift),
                                                        chunk);
  }
};
template <class KV, int kDim, int kKeys, bool kByTma = false, int kHeads = 1>
struct KvTileOf {
  using Type = SwizzledKvTile<(kDim * sizeof(KV) + 127) / 128, kKeys>;
};
template <int kDim, int kKeys>
struct KvTileOf<E2m1, kDim, kKeys, false, 1> {
  using Type = PackedKvTile<kDim / 2, kKeys>;
};
template <int kDim, int kKeys, int kHeads>
struct KvTileOf<E2m1, kDim, kKeys, true, kHeads> {
  using Type = JoinedKvTile<kDim / 2, kKeys, kHeads>;
};

// Keys and values of a warp in shared memory. Scales of NVFP4: a row of kDim / 16 bytes for each key; zeros for keys
// that are not loaded.
struct KvStage {
  const char* k;
  char* v;
  const uint8_t *k_scales, *v_scales;
};

// The keys that all rows of a q tile attend to.
struct VisibleKeys {
  int first;                 // packed row
  int full_begin, full_end;  // keys that every row attends to
  bool needs_transform;      // soft cap or ALiBi

  FI_DEVICE void begin(const BatchDecodeParams& params, const AttentionProblem& p, int kv_head, int first_row,
                       int rows) {
    first = first_row;
    needs_transform = p.scores.soft_cap > 0.f || p.scores.alibi;
    full_begin = p.mask.first_key(params.row(kv_head, first + rows - 1).i);
    full_end = p.mask.end_key(params.row(kv_head, first).i);
    if (p.mask.draft) full_end = min(full_end, p.mask.kv_len - p.mask.qo_len);
  }
  // Whether `count` keys from `key` need only a scale: no soft cap, no ALiBi, and visible to all rows.
  FI_DEVICE bool plain(int key, int count, int low, int high) const {
    return !needs_transform && key >= max(full_begin, low) && key + count <= min(full_end, high);
  }
  // The query token of row r of the q tile; rarely needed, so it takes no register.
  FI_DEVICE int token(const AttentionProblem& p, int r) const { return min(p.row(0, first + r).i, p.mask.qo_len - 1); }
};

// T: the operand type of mma. fp8 keys are converted to halves in registers. ldmatrix gives a lane four neighbours of
// an fp8 row, but the mma operand has two of them and two that are eight columns further. The columns of a step of 16
// are therefore permuted: 4c, 4c + 1 stand at 2c, 2c + 1, and 4c + 2, 4c + 3 at 2c + 8, 2c + 9. q has the same order.
// kKeys: 16, or 32, which spreads the latency of a step over twice the keys.
template <class T, class Q, class KV, int kDim, class KvTile, int kKeys = 16>
struct WarpMmaTile {
  static constexpr bool kFp4 = false, kFp8 = sizeof(KV) == 1;
  static constexpr int kK16Tiles = kKeys / 16, kN8Tiles = kKeys / 8;
  static constexpr int kSteps = kDim / 16, kChunks = kDim * sizeof(KV) / 16, kLines = (kChunks + 7) / 8;
  static constexpr int kPitch = kDim + 16 / sizeof(Q);  // of rows of queries in shared memory
  static constexpr bool kQInRegisters =
      kDim <= 128;  // queries stay in registers, else each step loads them from shared memory

  unsigned q[kQInRegisters ? kSteps : 1][4];
  float o[kDim / 8][4], row_max[2], row_sum[2];  // of the lane's two rows
  float scale[2], slope[2];
  VisibleKeys keys;
  const KvTile kv_tile;
  const int lane, first_key;  // first_key: of the warp in the KV tile
  // The offset of the lane's row of an even chunk, for each line and 16 keys; other chunks differ in three bits.
  unsigned k_row[kK16Tiles][kLines], v_row[kK16Tiles][kLines];

  FI_DEVICE WarpMmaTile(KvTile kv_tile, int first_key)
      : kv_tile(kv_tile), lane(threadIdx.x % 32), first_key(first_key) {
#pragma unroll
    for (int i = 0; i < kK16Tiles; ++i)
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        k_row[i][line] = kv_tile.offset(first_key + i * 16 + lane / 16 * 8 + lane % 8, line * 8 + lane / 8 % 2);
        v_row[i][line] = kv_tile.offset(first_key + i * 16 + lane % 16, line * 8 + lane / 16);
      }
  }

  // rows: of the tile; queries: its row r at r * kPitch, in shared memory, until the end of the work tile.
  FI_DEVICE void begin(const BatchDecodeParams& params, const AttentionProblem& p, int kv_head, int first_row, int rows,
                       const Q* queries) {
    keys.begin(params, p, kv_head, first_row, rows);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) o[n][c] = 0.f;
    const Row row = params.row(kv_head, first_row + max(min(lane % 16, rows - 1), 0));
    const HeadScores head = p.head_scores<CudaMath>(row.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // each lane computes one row, then exchanges: half the code
      const int from = half * 8 + lane / 4;
      scale[half] = __shfl_sync(0xffffffffu, head.scale, from),
      slope[half] = __shfl_sync(0xffffffffu, head.slope, from);
      row_max[half] = kMinusInf, row_sum[half] = 0.f;
    }
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_q_fragment(queries, step, q[step]);
    }
  }

  FI_DEVICE bool plain(int key, int low, int high) const { return keys.plain(key, kKeys, low, high); }

  // Attends to keys [key, key + kKeys) of a stage. Those outside of [low, high) are masked: their memory holds
  // any bits. problem() returns the attention problem of the request, a call so that it takes no registers where it is
  // rarely needed. kPlain: for keys of `plain`; its code has no branches around rare transforms.
  template <bool kPlain, class Problem, class WaitForValues>
  FI_DEVICE void attend(Problem&& problem, const Q* queries, const KvStage& at, int key, int low, int high,
                        WaitForValues&& wait_for_values) {
    const char* const k = at.k;
    char* const v = at.v;
    float s[kN8Tiles][4] = {}, odd[kN8Tiles][4] = {};  // two sums each halve the latency of a chain of mma
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      constexpr int kStepsPerPair = kFp8 ? 2 : 1;
      unsigned a[kStepsPerPair][4];
#pragma unroll
      for (int x = 0; x < kStepsPerPair; ++x)
        if (chunk + x < kChunks) q_fragment(queries, chunk * kStepsPerPair / 2 + x, a[x]);
#pragma unroll
      for (int k16 = 0; k16 < kK16Tiles; ++k16) {
        unsigned b[4];
        ldmatrix_x4(b, k + (k_row[k16][chunk / 8] ^ chunk % 8 << 4));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = k16 * 2 + half;
          if constexpr (kFp8) {
#pragma unroll
            for (int x = 0; x < 2 && chunk + x < kChunks; ++x)
              mma_m16n8k16(x ? odd[n] : s[n], a[x], halves(b[2 * half + x], KV{}), upper_halves(b[2 * half + x], KV{}),
                           T{});
          } else {
            mma_m16n8k16(chunk % 4 ? odd[n] : s[n], a[0], b[2 * half], b[2 * half + 1], T{});
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kN8Tiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = (s[n][c] + odd[n][c]) * scale[c / 2];
    if (!kPlain && keys.needs_transform) transform_scores(problem(), key, s);
    if (!kPlain && (key < max(keys.full_begin, low) || key + kKeys > min(keys.full_end, high))) {
      const AttentionProblem p = problem();
      const Mask& mask = p.mask;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned visible = mask.seen(keys.token(p, half * 8 + lane / 4), key, low, high) >> lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kN8Tiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (!(visible >> (n * 8 + c) & 1)) s[n][half * 2 + c] = kMinusInf;
      }
    }
    update_softmax(s);
    wait_for_values();
    if (!kPlain && (key < low || key + kKeys > high)) clear_values(v, low - key, high - key);
#pragma unroll
    for (int k16 = 0; k16 < kK16Tiles; ++k16) {
      const float (&left)[4] = s[k16 * 2], (&right)[4] = s[k16 * 2 + 1];
      const unsigned a[4] = {pack_pair(left[0], left[1], T{}), pack_pair(left[2], left[3], T{}),
                             pack_pair(right[0], right[1], T{}), pack_pair(right[2], right[3], T{})};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        unsigned b[4];
        ldmatrix_x4_trans(b, v + (v_row[k16][chunk / 8] ^ chunk % 8 << 4));
        if constexpr (kFp8) {
#pragma unroll
          for (int x = 0; x < 2 && chunk + x < kChunks; ++x) {  // 16 columns: the even ones, the odd ones
            const unsigned low_keys = __byte_perm(b[2 * x], 0, 0x3120);
            const unsigned high_keys = __byte_perm(b[2 * x + 1], 0, 0x3120);
            mma_m16n8k16(o[2 * (chunk + x)], a, halves(low_keys, KV{}), halves(high_keys, KV{}), T{});
            mma_m16n8k16(o[2 * (chunk + x) + 1], a, upper_halves(low_keys, KV{}), upper_halves(high_keys, KV{}), T{});
          }
        } else {
          mma_m16n8k16(o[chunk], a, b[0], b[1], T{});
          mma_m16n8k16(o[chunk + 1], a, b[2], b[3], T{});
        }
      }
    }
  }

  // Stores rows of unnormalised output, `pitch` floats apart, and their states (row_max, row_sum).
  FI_DEVICE void store(int rows, float* to, int pitch, float2* states) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = half * 8 + lane / 4;
      float sum = row_sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (r >= rows) continue;
      if (lane % 4 == 0) states[r] = make_float2(row_max[half], sum);
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
  // The mma operand of one step of 16 columns.
  FI_DEVICE void load_q_fragment(const Q* queries, int step, unsigned (&a)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Q* at = queries + (half * 8 + lane / 4) * kPitch + step * 16 + lane % 4 * (kFp8 ? 4 : 2);
      a[half] = q_pair(at);
      a[half + 2] = q_pair(at + (kFp8 ? 2 : 8));
    }
  }
  FI_DEVICE void q_fragment(const Q* queries, int step, unsigned (&a)[4]) const {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int x = 0; x < 4; ++x) a[x] = q[step][x];
    } else {
      load_q_fragment(queries, step, a);
    }
  }
  FI_DEVICE static unsigned q_pair(const Q* at) {
    if constexpr (sizeof(Q) == 1) {
      return halves(*reinterpret_cast<const unsigned short*>(at), Q{});
    } else if constexpr (!kIsSame<Q, T>) {
      return pack_pair(to_float(at[0]), to_float(at[1]), T{});
    } else {
      return *reinterpret_cast<const unsigned*>(at);
    }
  }

  // Soft cap and ALiBi.
  FI_DEVICE void transform_scores(const AttentionProblem& p, int key, float (&s)[kN8Tiles][4]) const {
#pragma unroll
    for (int n = 0; n < kN8Tiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int j = key + n * 8 + lane % 4 * 2 + c % 2, row = keys.token(p, c / 2 * 8 + lane / 4);
        const HeadScores head{scale[c / 2], p.scores.cap(), slope[c / 2]};
        s[n][c] = head.template score<CudaMath>(s[n][c], static_cast<float>(j - row));
      }
  }

  // One step of the online softmax: replaces scores by exp2(score - row_max), and rescales row_sum and o where row_max
  // grows. Four lanes share a row.
  FI_DEVICE void update_softmax(float (&s)[kN8Tiles][4]) {
    float new_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      new_max[half] = row_max[half];
#pragma unroll
      for (int n = 0; n < kN8Tiles; ++n)
        new_max[half] = fmaxf(new_max[half], fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(0xffffffffu, new_max[half], 1));
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(0xffffffffu, new_max[half], 2));
    }
    if (__any_sync(0xffffffffu, new_max[0] > row_max[0] || new_max[1] > row_max[1])) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float rescale = softmax_exp2<CudaMath>(row_max[half], softmax_reference(new_max[half]));
        row_max[half] = new_max[half];
        row_sum[half] *= rescale;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) o[n][half * 2] *= rescale, o[n][half * 2 + 1] *= rescale;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = softmax_reference(row_max[half]);
#pragma unroll
      for (int n = 0; n < kN8Tiles; ++n)
#pragma unroll
        for (int c = half * 2; c < half * 2 + 2; ++c) {
          s[n][c] = softmax_exp2<CudaMath>(s[n][c], reference);
          row_sum[half] += s[n][c];
        }
    }
  }

  // Zeroes the values of keys outside of [begin, end): a probability of 0 times NaN is NaN.
  FI_DEVICE void clear_values(char* v, int begin, int end) const {
#pragma unroll 1
    for (int at = lane; at < kKeys * kChunks; at += 32) {
      const int key = at / kChunks, chunk = at % kChunks;
      if (key < begin || key >= end)
        *reinterpret_cast<uint4*>(v + kv_tile.offset(first_key + key, chunk)) = make_uint4(0, 0, 0, 0);
    }
#if __CUDA_ARCH__ >= 900
    fence_async_shared();  // order: refill: what this lane has stored is before a later copy to the same address
#endif
    __syncwarp();
  }
};

}  // namespace fi
