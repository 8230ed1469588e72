// The mma tile of one warp in decode over NVFP4 keys: 16 or 32 keys at a time against up to 8 or 16 packed query rows.
// Keys and values are the first operand of mma, queries and probabilities the second, so that eight rows take half the
// products and half the accumulators of 16. sm_80 and later.
#pragma once
#include "fi/attention/decode/warp_mma_tile.cuh"

namespace fi {

// kRows: 8 or 16. A lane gets eight neighbours 8c to 8c + 7 of a row of keys for two steps, in the order of
// e2m1_halves: step 0 has 8c and 8c + 4 at 2c, 2c + 1, and 8c + 1 and 8c + 5 at 2c + 8, 2c + 9; step 1 the two after
// each. Queries have the same order. Scaled halves are exact: a product of e2m1 and e4m3 has six bits and is a multiple
// of 2^-10. They stay 2^14 too small, in scores and outputs.
template <class Q, int kDim, class KvTile, int kKeys, int kRows>
struct WarpFp4Tile {
  using T = __half;
  static constexpr bool kFp4 = true;
  static constexpr int kM = kKeys / 16, kN = kRows / 8;  // tiles of mma
  static constexpr int kSteps = kDim / 16, kChunks = kDim / 32;
  static constexpr int kScaleBytes = kDim / 16;         // of a row
  static constexpr int kPitch = kDim + 16 / sizeof(Q);  // of rows of queries in shared memory
  static constexpr bool kQInRegisters = kDim <= 128;

  unsigned q[kQInRegisters ? kSteps : 1][kN][2];
  float o[kDim / 16][kN][4];                                         // columns by rows; see store
  float row_max[kN][2], row_sum[kN][2], scale[kN][2], slope[kN][2];  // of rows 8n + 2(lane % 4) and the next
  VisibleKeys keys;
  const int lane, first_key;      // first_key: of the warp in the KV tile
  unsigned k_row[kM], v_row[kM];  // offsets of the lane's row of an even chunk; other chunks differ in three bits

  FI_DEVICE WarpFp4Tile(KvTile kv_tile, int first_key) : lane(threadIdx.x % 32), first_key(first_key) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      k_row[m] = kv_tile.offset(first_key + m * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
      v_row[m] = kv_tile.value_offset(first_key + m * 16 + lane % 16, lane / 16);
    }
  }

  // As those of WarpMmaTile.
  FI_DEVICE void begin(const BatchDecodeParams& params, const AttentionProblem& p, int kv_head, int first_row, int rows,
                       const Q* queries) {
    keys.begin(params, p, kv_head, first_row, rows);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[i][n][c] = 0.f;
    const Row row = params.row(kv_head, first_row + max(min(lane % kRows, rows - 1), 0));
    const HeadScores head = p.head_scores<CudaMath>(row.head);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int from = n * 8 + lane % 4 * 2 + c;
        scale[n][c] = __shfl_sync(0xffffffffu, head.scale * kE2m1HalvesFactor, from);
        slope[n][c] = __shfl_sync(0xffffffffu, head.slope, from);
        row_max[n][c] = kMinusInf, row_sum[n][c] = 0.f;
      }
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_q(queries, step, q[step]);
    }
  }
  FI_DEVICE bool plain(int key, int low, int high) const { return keys.plain(key, kKeys, low, high); }

  template <bool kPlain, class Problem, class WaitForValues>
  FI_DEVICE void attend(Problem&& problem, const Q* queries, const KvStage& at, int key, int low, int high,
                        WaitForValues&& wait_for_values) {
    float s[kM][kN][4] = {};
    multiply_qk(queries, at, s);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] *= scale[n][c % 2];
    if (!kPlain && keys.needs_transform) transform_scores(problem(), key, s);
    if (!kPlain && (key < max(keys.full_begin, low) || key + kKeys > min(keys.full_end, high))) {
      const AttentionProblem p = problem();
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned visible = p.mask.seen(keys.token(p, row_of(n, half)), key, low, high) >> lane / 4;
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int c = half; c < 4; c += 2)
              if (!(visible >> (m * 16 + c / 2 * 8) & 1)) s[m][n][c] = kMinusInf;
        }
    }
    update_softmax(s);
    wait_for_values();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      unsigned b[kN][2];
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          b[n][half] = transposed_8x8(pack_pair(s[m][n][half * 2], s[m][n][half * 2 + 1], T{}));
      multiply_pv(b, at, m);
    }
  }

  FI_DEVICE void store(int rows, float* to, int pitch, float2* states) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row_of(n, half);
        float sum = row_sum[n][half];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (r >= rows) continue;
        if (lane < 4) states[r] = make_float2(row_max[n][half], sum);
        float* row = to + r * pitch + lane / 4 * 4;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {  // columns 4u and 4u + 1, then 4u + 2 and 4u + 3, of 32
          const auto x = [&](int i, int c) { return kE2m1HalvesFactor * o[chunk * 2 + i][n][c + half]; };
          *reinterpret_cast<float4*>(row + chunk * 32) = make_float4(x(0, 0), x(0, 2), x(1, 0), x(1, 2));
        }
      }
  }

 private:
  FI_DEVICE int row_of(int n, int half) const { return n * 8 + lane % 4 * 2 + half; }

  FI_DEVICE void load_q(const Q* queries, int step, unsigned (&b)[kN][2]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const Q* at = queries + (n * 8 + lane / 4) * kPitch + step / 2 * 32 + lane % 4 * 8 + step % 2 * 2;
      b[n][0] = pack_pair(to_float(at[0]), to_float(at[4]), T{});
      b[n][1] = pack_pair(to_float(at[1]), to_float(at[5]), T{});
    }
  }

  FI_DEVICE void multiply_qk(const Q* queries, const KvStage& at, float (&s)[kM][kN][4]) const {
    float odd[kM][kN][4] = {};  // two sums each halve the latency of a chain of mma
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        unsigned codes[4], y[2][2][4];  // of keys 0 to 7 and 8 to 15, each in both chunks
        ldmatrix_x4(codes, at.k + (k_row[m] ^ chunk << 4));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_key + m * 16 + half * 8 + lane / 4;
          const unsigned four = *reinterpret_cast<const unsigned*>(at.k_scales + row * kScaleBytes + chunk * 2);
          const unsigned scales = halves(__byte_perm(four, 0, lane & 2 ? 0x4431 : 0x4420), __nv_fp8_e4m3{});
#pragma unroll
          for (int x = 0; x < 2; ++x)
            scaled_halves(codes[2 * half + x], __byte_perm(scales, 0, x ? 0x3232 : 0x1010), y[x][half]);
        }
#pragma unroll
        for (int x = 0; x < 2; ++x)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int step = (chunk + x) * 2 + i;
            const unsigned a[4] = {y[x][0][2 * i], y[x][1][2 * i], y[x][0][2 * i + 1], y[x][1][2 * i + 1]};
            unsigned loaded[kN][2];
            if constexpr (!kQInRegisters) load_q(queries, step, loaded);
#pragma unroll
            for (int n = 0; n < kN; ++n) {
              const auto b = [&](int j) { return kQInRegisters ? q[kQInRegisters ? step : 0][n][j] : loaded[n][j]; };
              mma_m16n8k16(i ? odd[m][n] : s[m][n], a, b(0), b(1), T{});
            }
          }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] += odd[m][n][c];
  }

  // Adds the products of 16 keys to o. The m of an mma is the place of 16 bits in a chunk, which hold four columns:
  // columns 4u + j of 32 are the first (j even) or the last eight of the m of o[2 chunk + j / 2].
  FI_DEVICE void multiply_pv(const unsigned (&b)[kN][2], const KvStage& at, int m) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      unsigned codes[4], scales[2];  // of keys 2c and 2c + 1 of the first and of the last eight, in both chunks
      ldmatrix_x4_trans(codes, at.v + (v_row[m] ^ chunk << 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint8_t* from = at.v_scales + (first_key + m * 16 + half * 8 + lane % 4 * 2) * kScaleBytes + chunk * 2;
        scales[half] = __byte_perm(*reinterpret_cast<const unsigned*>(from),
                                   *reinterpret_cast<const unsigned*>(from + kScaleBytes), lane & 16 ? 0x7351 : 0x6240);
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        unsigned low[4], high[4];
        scaled_halves(codes[2 * x], x ? upper_halves(scales[0], __nv_fp8_e4m3{}) : halves(scales[0], __nv_fp8_e4m3{}),
                      low);
        scaled_halves(codes[2 * x + 1],
                      x ? upper_halves(scales[1], __nv_fp8_e4m3{}) : halves(scales[1], __nv_fp8_e4m3{}), high);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned a[4] = {low[2 * i], low[2 * i + 1], high[2 * i], high[2 * i + 1]};
#pragma unroll
          for (int n = 0; n < kN; ++n) mma_m16n8k16(o[(chunk + x) * 2 + i][n], a, b[n][0], b[n][1], T{});
        }
      }
    }
  }

  // Pairs of eight values times a pair of scales.
  FI_DEVICE static void scaled_halves(unsigned codes, unsigned scales, unsigned (&y)[4]) {
    e2m1_halves(codes, y);
#pragma unroll
    for (unsigned& pair : y) asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(scales));
  }

  // Soft cap and ALiBi.
  FI_DEVICE void transform_scores(const AttentionProblem& p, int key, float (&s)[kM][kN][4]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int j = key + m * 16 + c / 2 * 8 + lane / 4, row = keys.token(p, row_of(n, c % 2));
          const HeadScores head{scale[n][c % 2], p.scores.cap(), slope[n][c % 2]};
          s[m][n][c] = head.template score<CudaMath>(s[m][n][c], static_cast<float>(j - row));
        }
  }

  // As WarpMmaTile's. The eight lanes of the same lane % 4 share two rows of each n.
  FI_DEVICE void update_softmax(float (&s)[kM][kN][4]) {
    float new_max[kN][2];
    bool grows = false;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = row_max[n][half];
#pragma unroll
        for (int m = 0; m < kM; ++m) x = fmaxf(x, fmaxf(s[m][n][half], s[m][n][half + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
        new_max[n][half] = x;
        grows |= x > row_max[n][half];
      }
    if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float rescale = softmax_exp2<CudaMath>(row_max[n][half], softmax_reference(new_max[n][half]));
          row_max[n][half] = new_max[n][half];
          row_sum[n][half] *= rescale;
#pragma unroll
          for (int i = 0; i < kDim / 16; ++i) o[i][n][half] *= rescale, o[i][n][half + 2] *= rescale;
        }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = softmax_reference(row_max[n][half]);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int c = half; c < 4; c += 2) {
            s[m][n][c] = softmax_exp2<CudaMath>(s[m][n][c], reference);
            row_sum[n][half] += s[m][n][c];
          }
      }
  }
};

// The tile of a warp for any type of keys. kRows: the most rows of a q tile, which only NVFP4 makes use of.
template <class T, class Q, class KV, int kDim, class KvTile, int kKeys, int kRows = kDecodeQTile>
struct DecodeTileOf {
  using Type = WarpMmaTile<T, Q, KV, kDim, KvTile, kKeys>;
};
template <class T, class Q, int kDim, class KvTile, int kKeys, int kRows>
struct DecodeTileOf<T, Q, E2m1, kDim, KvTile, kKeys, kRows> {
  using Type = WarpFp4Tile<Q, kDim, KvTile, kKeys, kRows>;
};

}  // namespace fi
