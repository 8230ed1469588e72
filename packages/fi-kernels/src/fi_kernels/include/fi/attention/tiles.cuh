// A tile of 64 packed query rows against all its keys on tensor cores: 4 warps of 16 rows, blocks of 64 keys, online
// softmax. T is the 16-bit type that holds q and k exactly; probabilities are rounded to it for the second product.
// Head dims are taken 128 at a time: q and k in steps, columns of the output in separate blocks, so one kernel serves
// all of them.
#pragma once
#include "fi/attention/eight.cuh"
#include "fi/attention/pages.cuh"
#include "fi/attention/softmax.h"
#include "fi/attention/variant.h"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/fp8.cuh"
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
  static constexpr bool kHalf = IsHalf<T>::value;
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

  FI_DEVICE void attend(Variant& variant) {
    prepare();
    const int begin = p.mask.first_key(shared.row[0].i), end = p.mask.end_key(shared.row[rows - 1].i);
    // Keys that every row of the tile sees.
    const int full_begin = p.mask.first_key(shared.row[rows - 1].i), full_end = p.mask.end_key(shared.row[0].i);
    const bool wide = p.dim_qk > kColumns;
    Ahead keys, values;
    fetch<kK>(keys, 0, begin, end);
#pragma unroll 1
    for (int key = begin; key < end; key += kKeys) {
      fetch<kV>(values, column, key, end);
      float s[kKeys / 8][4] = {};
#pragma unroll 1
      for (int dim = 0; dim < p.dim_qk; dim += kColumns) {
        if (dim == 0)
          cp_async_wait<1>();
        else
          cp_async_wait<0>();
        land<kK>(keys, dim, key, end);
        if (key == begin || wide) stage_q(dim);
        __syncthreads();
        multiply_keys(s, min(kColumns, p.dim_qk - dim));
        __syncthreads();
        if (dim + kColumns < p.dim_qk) fetch<kK>(keys, dim + kColumns, key, end);
      }
      if constexpr (Variant::kCustom)
        transform(key, end, s, variant);
      else
        score(key, end, s);
      if constexpr (kDirect) fetch<kK>(keys, 0, key + kKeys, end);
      if constexpr (!Variant::kCustom)
        if (key < full_begin || key + kKeys > full_end) hide(key, s);
      if constexpr (Variant::kSoftmax) soften(s);
      cp_async_wait<1>();
      land<kV>(values, column, key, end);
      if constexpr (!kDirect) fetch<kK>(keys, 0, key + kKeys, end);
      __syncthreads();
      multiply_values(s);
      __syncthreads();
    }
  }

  // Normalises, and writes the rows through shared memory: whole lines, whatever the dtype. sinks: [qo_heads], or null.
  FI_DEVICE void store(Variant& variant, const float* sinks = nullptr) {
    float* tile = reinterpret_cast<float*>(&shared);
    const float scale = p.value_scale(kv_head);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row at = shared.row[place(half)];
      float factor = scale;
      if (sinks) factor *= add_sink<CudaMath>(sinks[at.head], m[half], d[half]);
      const auto output = variant.end(at, m[half], d[half], factor);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          tile[place(half) * kOutPitch + n * 8 + lane % 4 * 2 + c] = output(o[n][half * 2 + c]);
      if (p.lse && column == 0 && lane % 4 == 0 && place(half) < rows)
        p.lse[static_cast<int64_t>(at.i) * p.qo_heads + at.head] = softmax_lse<CudaMath>(m[half], d[half]);
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

  // Keys or values; what they are is read where it is needed, since registers are scarce.
  enum Part { kK, kV };
  template <Part kPart>
  FI_DEVICE T* place_of(int r) const {
    return (kPart == kK ? shared.k : shared.v) + r * kPitch + threadIdx.x % 16 * 8;
  }
  template <Part kPart>
  FI_DEVICE const KV* row(int j) const {
    const int64_t head = kPart == kK ? p.k_head : p.v_head, token = kPart == kK ? p.k_token : p.v_token;
    return static_cast<const KV*>(kPart == kK ? p.k : p.v) + kv_head * head +
           pages.page(j) * (kPart == kK ? pages.k_page : pages.v_page) + pages.slot(j) * token;
  }
  // Whether elements are taken one by one, rotated or from rows that are not aligned.
  template <Part kPart>
  FI_DEVICE bool each() const {
    return !p.aligned || (kPart == kK && p.rotary.enabled);
  }

  // 64 keys from `key` on (zeros from `end` on) by 128 dimensions from `dim` on (zeros from the last on) are sent on
  // their way, in a group of copies: 16-bit ones straight to shared memory, which nothing may read then, others to
  // registers.
  static constexpr bool kDirect = sizeof(KV) == sizeof(T);
  struct Ahead {
    Eight<KV> block[kDirect ? 1 : kKeys / 8];
  };
  template <Part kPart>
  FI_DEVICE void fetch(Ahead& ahead, int dim, int key, int end) const {
    if (key < end && !each<kPart>()) {
      const int x = dim + threadIdx.x % 16 * 8, y = threadIdx.x / 16;  // then every 8th row
      const bool within = x < (kPart == kK ? p.dim_qk : p.dim_vo);
      if constexpr (kDirect) {
#pragma unroll 4
        for (int r = y; r < kKeys; r += 8) {
          const bool inside = within && key + r < end;
          const void* at = kPart == kK ? p.k : p.v;
          if (inside) at = row<kPart>(key + r) + x;
          cp_async_16(place_of<kPart>(r), at, inside);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          const int j = key + y + n * 8;
          ahead.block[n].clear();
          if (within && j < end) ahead.block[n].read(row<kPart>(j) + x, true);
        }
      }
    }
    cp_async_commit();
  }

  // They have arrived, or this thread's copies have, and go to shared memory if they are not there.
  template <Part kPart>
  FI_DEVICE void land(const Ahead& ahead, int dim, int key, int end) const {
    const int x = dim + threadIdx.x % 16 * 8, y = threadIdx.x / 16;
    if (!each<kPart>()) {
      if constexpr (!kDirect) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) put(place_of<kPart>(y + n * 8), ahead.block[n]);
      }
      return;
    }
#pragma unroll 1
    for (int r = y; r < kKeys; r += 8) {
      if (key + r < end && x < (kPart == kK ? p.dim_qk : p.dim_vo))
        put_each(place_of<kPart>(r), row<kPart>(key + r), x, kPart == kK && p.rotary.enabled, key + r);
      else
        *reinterpret_cast<uint4*>(place_of<kPart>(r)) = make_uint4(0, 0, 0, 0);
    }
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

  // Products become scores.
  FI_DEVICE void score(int key, int end, float (&s)[kKeys / 8][4]) const {
    const float scale[2] = {shared.scores[place(0)].scale, shared.scores[place(1)].scale};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] *= scale[c / 2];
    if (p.scores.alibi || p.mask.selects()) {
      finish(key, end, s);
    } else if (p.scores.soft_cap > 0.f) {
      const float cap = p.scores.cap();
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[n][c] = cap * CudaMath::tanh(s[n][c]);
    }
  }

  // Products become the scores of a variant, for the keys that each row sees.
  FI_DEVICE void transform(int key, int end, float (&s)[kKeys / 8][4], Variant& variant) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = shared.row[place(half)];
      const int from = p.mask.first_key(row.i), to = place(half) < rows ? min(end, p.mask.end_key(row.i)) : 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = half * 2; c < half * 2 + 2; ++c) {
          const int j = key + n * 8 + lane % 4 * 2 + c % 2;
          s[n][c] = j >= from && j < to ? variant.score(s[n][c], row, kv_head, j) : Variant::kHidden;
        }
    }
    if (p.mask.selects()) finish(key, end, s);
  }

  // Keys outside of what causal and window leave to each of this lane's rows.
  FI_DEVICE void hide(int key, float (&s)[kKeys / 8][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = shared.row[place(half)].i, from = p.mask.first_key(i), to = p.mask.end_key(i);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int j = key + n * 8 + lane % 4 * 2 + c;
          if (j < from || j >= to) s[n][half * 2 + c] = kMinusInf;
        }
    }
  }

  // ALiBi and custom masks, with a soft cap: rare, so a loop through memory keeps the code short. The memory is that of
  // the keys, which have been used.
  FI_DEVICE void finish(int key, int end, float (&s)[kKeys / 8][4]) const {
    static_assert(sizeof(float) * kThreads * kKeys / 2 <= sizeof(shared.k), "the scores replace the keys");
    float* slot = reinterpret_cast<float*>(shared.k) + threadIdx.x;
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) slot[e * kThreads] = s[e / 4][e % 4];
#pragma unroll 1
    for (int e = 0; e < kKeys / 2; ++e) {
      const int r = place(e / 2 % 2), i = shared.row[r].i, j = key + e / 4 * 8 + lane % 4 * 2 + e % 2;
      if (j >= end) continue;
      float score = slot[e * kThreads];
      if constexpr (!Variant::kCustom)
        score = shared.scores[r].template score<CudaMath>(score, static_cast<float>(j - i));
      slot[e * kThreads] = p.mask.keeps(i, j) ? score : Variant::kHidden;
    }
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) s[e / 4][e % 4] = slot[e * kThreads];
    __syncthreads();
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
