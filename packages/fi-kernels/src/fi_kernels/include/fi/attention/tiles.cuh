// A tile of 64 packed query rows against all its keys on tensor cores: 4 warps of 16 rows, blocks of 64 keys, online
// softmax. T is the 16-bit type that holds q and k exactly; probabilities are rounded to it for the second product.
// Head dims are taken 128 at a time: q and k in steps, columns of the output in separate blocks, so one kernel serves
// all of them.
#pragma once
#include "fi/attention/eight.cuh"
#include "fi/attention/pages.cuh"
#include "fi/attention/softmax.h"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"

namespace fi {

FI_DEVICE unsigned pack(float x, float y, __half) {
  const __half2 pair = __floats2half2_rn(x, y);
  unsigned word;
  memcpy(&word, &pair, sizeof word);
  return word;
}
FI_DEVICE unsigned pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  unsigned word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

template <class T, class Q, class KV, class Pages = OnePage>
struct TilesKernel {
  static constexpr int kThreads = 128, kRows = 64, kKeys = 64, kColumns = 128;
  static constexpr int kPitch = kColumns + 8;  // 16 bytes more: rows of a matrix fall into different banks

  struct Shared {
    T q[kRows * kPitch], k[kKeys * kPitch], v[kKeys * kPitch];
    HeadScores scores[kRows];
    Row row[kRows];
    uint64_t steps[256];  // rotary angles
  };
  static constexpr int kOutPitch = kColumns + 4;
  static_assert(sizeof(float) * kRows * kOutPitch <= sizeof(T) * 3 * kRows * kPitch, "the output takes their place");

  const AttentionProblem& p;
  Shared& shared;
  const Pages pages;
  int kv_head, first, rows, column;  // of the packed rows, of the output's columns
  int warp, lane;
  float o[kColumns / 8][4] = {};
  float m[2] = {kMinusInf, kMinusInf}, d[2] = {};  // of rows lane / 4 and lane / 4 + 8 of the warp

  // Packed rows from first on, before end.
  FI_DEVICE TilesKernel(const AttentionProblem& p, Shared& shared, int kv_head, int first, int end, int column,
                        Pages pages = {})
      : p(p),
        shared(shared),
        pages(pages),
        kv_head(kv_head),
        first(first),
        rows(min(kRows, end - first)),
        column(column),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32) {}

  FI_DEVICE void attend() {
    prepare();
    int i[2], from[2], to[2];  // keys of each of this lane's rows
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      i[half] = shared.row[place(half)].i;
      from[half] = p.mask.first_key(i[half]);
      to[half] = p.mask.end_key(i[half]);
      scale[half] = shared.scores[place(half)].scale;
    }
    const int begin = p.mask.first_key(shared.row[0].i), end = p.mask.end_key(shared.row[rows - 1].i);
    // Keys that every row of the tile sees.
    const int full_begin = p.mask.first_key(shared.row[rows - 1].i), full_end = p.mask.end_key(shared.row[0].i);
#pragma unroll 1
    for (int key = begin; key < end; key += kKeys) {
      float s[kKeys / 8][4] = {};
#pragma unroll 1
      for (int dim = 0; dim < p.dim_qk; dim += kColumns) {
        __syncthreads();
        if (key == begin || p.dim_qk > kColumns) stage_q(dim);
        stage(shared.k, p.k, pages.k_page, p.k_token, p.k_head, dim, p.dim_qk, key, end, p.rotary.enabled);
        if (dim == 0) stage(shared.v, p.v, pages.v_page, p.v_token, p.v_head, column, p.dim_vo, key, end, false);
        __syncthreads();
        multiply_keys(s, min(kColumns, p.dim_qk - dim));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[n][c] *= scale[c / 2];
      if (p.special()) finish(key, end, s);
      if (key < full_begin || key + kKeys > full_end) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int j = key + n * 8 + lane % 4 * 2 + c % 2;
            if (j < from[c / 2] || j >= to[c / 2]) s[n][c] = kMinusInf;
          }
      }
      soften(s);
      multiply_values(s);
    }
  }

  // Normalises, and writes the rows through shared memory: whole lines, whatever the dtype. sinks: [qo_heads], or null.
  FI_DEVICE void store(const float* sinks = nullptr) {
    float* tile = reinterpret_cast<float*>(&shared);
    const float scale = p.value_scale(kv_head);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float factor = scale;
      if (sinks) factor *= add_sink<CudaMath>(sinks[shared.row[place(half)].head], m[half], d[half]);
      factor *= softmax_inverse(d[half]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          tile[place(half) * kOutPitch + n * 8 + lane % 4 * 2 + c] = o[n][half * 2 + c] * factor;
      if (p.lse && column == 0 && lane % 4 == 0 && place(half) < rows) {
        const Row at = shared.row[place(half)];
        p.lse[static_cast<int64_t>(at.i) * p.qo_heads + at.head] = softmax_lse<CudaMath>(m[half], d[half]);
      }
    }
    __syncthreads();
    const int bytes = out_bytes(p.out_type);
#pragma unroll 1
    for (int r = warp; r < rows; r += kThreads / 32) {
      const Row at = shared.row[r];
      const int64_t out = at.i * p.out_token + at.head * p.out_head + column;
      if (lane * 4 >= columns()) continue;
      const bool vector = ((reinterpret_cast<uint64_t>(p.out) + out * bytes) & (4 * bytes - 1)) == 0;
      const float4 x = *reinterpret_cast<const float4*>(tile + r * kOutPitch + lane * 4);
      store_four(p.out, p.out_type, out + lane * 4, x, vector);
    }
  }

 private:
  FI_DEVICE int place(int half) const { return warp * 16 + half * 8 + lane / 4; }  // in the tile
  FI_DEVICE int columns() const { return min(kColumns, p.dim_vo - column); }
  FI_DEVICE void prepare() {
    if (p.rotary.enabled) {
#pragma unroll 1
      for (int k = threadIdx.x; k < p.dim_qk / 2; k += kThreads) shared.steps[k] = p.rotary.step(k);
    }
    if (threadIdx.x < kRows) {  // places beyond the last row repeat the first one; nothing stores their result
      const Row row = p.row(kv_head, first + (threadIdx.x < rows ? threadIdx.x : 0));
      shared.row[threadIdx.x] = row;
      shared.scores[threadIdx.x] = p.head_scores<CudaMath>(row.head);
    }
    __syncthreads();
  }

  // One row's eight elements at dim, to shared memory as T.
  template <class S>
  FI_DEVICE static void put(T* to, const Eight<S>& x) {
    uint4 words;
    if constexpr (sizeof(S) == sizeof(T)) {
      memcpy(&words, &x, sizeof words);
    } else {
      float f[8];
      x.floats(f);
      words = make_uint4(pack(f[0], f[1], T{}), pack(f[2], f[3], T{}), pack(f[4], f[5], T{}), pack(f[6], f[7], T{}));
    }
    *reinterpret_cast<uint4*>(to) = words;
  }

  // Eight elements at dim of a row, one by one: rotated, or from a row that is not aligned.
  template <class S>
  FI_DEVICE void put_each(T* to, const S* row, int dim, bool rotate, int64_t position) const {
    const auto read = [&](int d) { return to_float(row[d]); };
#pragma unroll 1
    for (int d = dim; d < dim + 8; ++d)
      to[d - dim] = from_float<T>(rotate ? rotated(read, d, p.dim_qk, position, shared.steps[rotary_pair(d, p.dim_qk)])
                                         : read(d));
  }

  // 64 keys from `key` on (zeros from `end` on) by 128 dimensions from `dim` on (zeros from `dims` on).
  FI_DEVICE void stage(T* to, const void* from, int64_t page, int64_t token, int64_t head, int dim, int dims, int key,
                       int end, bool rotate) const {
    const int x = threadIdx.x % 16 * 8, y = threadIdx.x / 16;  // then every 8th row
    const KV* base = static_cast<const KV*>(from) + kv_head * head + dim + x;
    const bool each = rotate || !p.aligned;
    Eight<KV> block[kKeys / 8];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const int j = key + y + n * 8;
      block[n].clear();
      if (!each && j < end && dim + x < dims) block[n].read(base + pages.page(j) * page + pages.slot(j) * token, true);
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) put(to + (y + n * 8) * kPitch + x, block[n]);
    if (!each || dim + x >= dims) return;
#pragma unroll 1
    for (int r = y; r < kKeys && key + r < end; r += 8)
      put_each(to + r * kPitch + x, base + pages.page(key + r) * page + pages.slot(key + r) * token - (dim + x), dim + x,
               rotate, key + r);
  }

  FI_DEVICE void stage_q(int dim) const {
    const int x = threadIdx.x % 16 * 8;
#pragma unroll 1
    for (int r = threadIdx.x / 16; r < kRows; r += 8) {
      T* to = shared.q + r * kPitch + x;
      const bool inside = r < rows && dim + x < p.dim_qk;
      const Row at = shared.row[r];
      const Q* from = static_cast<const Q*>(p.q) + at.i * p.q_token + at.head * p.q_head;
      if (inside && (p.rotary.enabled || !p.aligned)) {
        put_each(to, from, dim + x, p.rotary.enabled, p.mask.position(at.i));
      } else {
        Eight<Q> block;
        block.clear();
        if (inside) block.read(from + dim + x, true);
        put(to, block);
      }
    }
  }

  // Soft cap, ALiBi and custom mask: rare, so a loop through memory keeps the code short. The memory is that of the
  // keys, which have been used.
  FI_DEVICE void finish(int key, int end, float (&s)[kKeys / 8][4]) const {
    static_assert(sizeof(float) * kThreads * kKeys / 2 <= sizeof(shared.k), "the scores replace the keys");
    float* slot = reinterpret_cast<float*>(shared.k) + threadIdx.x;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) slot[e * kThreads] = s[e / 4][e % 4];
#pragma unroll 1
    for (int e = 0; e < kKeys / 2; ++e) {
      const int r = place(e / 2 % 2), i = shared.row[r].i, j = key + e / 4 * 8 + lane % 4 * 2 + e % 2;
      if (j >= end) continue;
      const float score = shared.scores[r].template score<CudaMath>(slot[e * kThreads], static_cast<float>(j - i));
      slot[e * kThreads] = p.mask.keeps(i, j) ? score : kMinusInf;
    }
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) s[e / 4][e % 4] = slot[e * kThreads];
  }

  // s += q k over the staged dimensions.
  FI_DEVICE void multiply_keys(float (&s)[kKeys / 8][4], int dims) const {
    const T* q = shared.q + (warp * 16 + lane % 16) * kPitch + lane / 16 * 8;
    const T* k = shared.k + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
    for (int dim = 0; dim < dims; dim += 16) {
      unsigned a[4], b[4];
      ldmatrix_x4(a, q + dim);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        ldmatrix_x4(b, k + n * 8 * kPitch + dim);
        mma_m16n8k16(s[n], a, b[0], b[1], T{});
        mma_m16n8k16(s[n + 1], a, b[2], b[3], T{});
      }
    }
  }

  // Scores become weights; m, d and o take the new maximum. Four lanes share a row.
  FI_DEVICE void soften(float (&s)[kKeys / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = m[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float reference = softmax_base(top), factor = softmax_weight<CudaMath>(m[half], reference);
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = half * 2; c < half * 2 + 2; ++c) {
          s[n][c] = softmax_weight<CudaMath>(s[n][c], reference);
          sum += s[n][c];
        }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      m[half] = top;
      d[half] = d[half] * factor + sum;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) o[n][half * 2] *= factor, o[n][half * 2 + 1] *= factor;
    }
  }

  // o += weights v. The accumulator layout of two score tiles is the operand layout of one step of 16 keys.
  FI_DEVICE void multiply_values(const float (&s)[kKeys / 8][4]) {
    const T* v = shared.v + lane % 16 * kPitch + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      const unsigned a[4] = {pack(s[n][0], s[n][1], T{}), pack(s[n][2], s[n][3], T{}),
                             pack(s[n + 1][0], s[n + 1][1], T{}), pack(s[n + 1][2], s[n + 1][3], T{})};
#pragma unroll
      for (int x = 0; x < kColumns / 8; x += 2) {
        if (x * 8 >= columns()) break;
        unsigned b[4];
        ldmatrix_x4_trans(b, v + n * 8 * kPitch + x * 8);
        mma_m16n8k16(o[x], a, b[0], b[1], T{});
        mma_m16n8k16(o[x + 1], a, b[2], b[3], T{});
      }
    }
  }
};

}  // namespace fi
