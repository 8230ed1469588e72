// A few packed query rows against a range of keys on CUDA cores, in fp32: decode, and whatever tensor cores do not take.
// kLanes lanes share a key, each holds kSlices * 8 of its dimensions; keys are dealt out over all lane groups of the
// block, each with its own softmax state; the states are merged once at the end.
#pragma once
#include "fi/attention/eight.cuh"
#include "fi/attention/softmax.h"
#include "fi/cuda/math.cuh"

namespace fi {

template <class Q, class KV, bool kAligned, int kLanes, int kSlices, int kRows>
struct RowsKernel {
  static constexpr int kThreads = 128, kGroups = kThreads / kLanes, kDims = kSlices * 8, kWidth = kLanes * kDims;
  static constexpr int kBytes = sizeof(KV) * kSlices;
  static constexpr int kUnroll = kBytes < 4 ? 4 / kBytes : 1;  // keys a lane group reads before it computes
  static_assert(kUnroll <= kRows, "rotated keys lie where the outputs come later");

  struct Shared {
    float q[kRows][kWidth];           // rotated and scaled: a dot product is a score
    float o[kGroups][kRows][kWidth];  // unnormalised, of each lane group
    float m[kGroups][kRows], d[kGroups][kRows];
    HeadScores scores[kRows];
    Row row[kRows];
    uint64_t steps[kWidth / 2];  // rotary angles
  };

  const AttentionProblem& p;
  Shared& shared;
  int kv_head, first, rows;  // of the packed rows
  int lane, group;           // place in the lane group, number of the group

  FI_DEVICE RowsKernel(const AttentionProblem& p, Shared& shared, int kv_head, int first)
      : p(p), shared(shared), kv_head(kv_head), first(first), rows(min(kRows, p.rows() - first)), lane(threadIdx.x % kLanes),
        group(threadIdx.x / kLanes) {}

  FI_DEVICE void load_queries() {
    if (p.rotary.enabled) {
#pragma unroll 1
      for (int k = threadIdx.x; k < p.dim_qk / 2; k += kThreads) shared.steps[k] = p.rotary.step(k);
    }
    if (threadIdx.x < kRows) {  // places beyond the last row repeat the first one; nothing reads their result
      const Row row = p.row(kv_head, first + (threadIdx.x < rows ? threadIdx.x : 0));
      shared.row[threadIdx.x] = row;
      shared.scores[threadIdx.x] = p.head_scores<CudaMath>(row.head);
    }
    __syncthreads();
#pragma unroll 1
    for (int x = threadIdx.x; x < kRows * kWidth; x += kThreads) {
      const int g = x / kWidth, d = x % kWidth;
      const Row at = shared.row[g];
      const Q* q = static_cast<const Q*>(p.q) + at.i * p.q_token + at.head * p.q_head;
      const auto read = [&](int d) { return to_float(q[d]); };
      float value = 0.f;
      if (d < p.dim_qk) value = p.rotary.enabled ? rotated(read, d, p.dim_qk, p.mask.position(at.i), step(d)) : read(d);
      shared.q[g][d] = value * shared.scores[g].scale;
    }
    __syncthreads();
  }

  // Keys [begin, end).
  FI_DEVICE void attend(int begin, int end) {
    float q[kRows][kDims], o[kRows][kDims] = {}, m[kRows], d[kRows];
    int from[kRows], to[kRows];
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
      const int i = shared.row[g].i;
      m[g] = kMinusInf, d[g] = 0.f;
      from[g] = p.mask.first_key(i), to[g] = min(end, p.mask.end_key(i));
#pragma unroll
      for (int x = 0; x < kDims; ++x) q[g][x] = shared.q[g][dim(x)];
    }
    const KV* keys = static_cast<const KV*>(p.k) + kv_head * p.k_head;
    const KV* values = static_cast<const KV*>(p.v) + kv_head * p.v_head;
#pragma unroll 1
    for (int base = begin; base < end; base += kGroups * kUnroll) {
      const int key = base + group;  // then every kGroups-th
      Eight<KV> k[kUnroll][kSlices], v[kUnroll][kSlices];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) read(keys, p.k_token, p.dim_qk, key + u * kGroups, end, k[u]);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) read(values, p.v_token, p.dim_vo, key + u * kGroups, end, v[u]);
      if (p.rotary.enabled) rotate(keys, key, end);
      float s[kRows][kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float x[kDims];
        floats(k[u], x);
        if (p.rotary.enabled) {
#pragma unroll
          for (int i = 0; i < kDims; ++i) x[i] = shared.o[group][u][dim(i)];
        }
#pragma unroll
        for (int g = 0; g < kRows; ++g) {
          s[g][u] = 0.f;
#pragma unroll
          for (int i = 0; i < kDims; ++i) s[g][u] += q[g][i] * x[i];
        }
      }
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2)
#pragma unroll
        for (int g = 0; g < kRows; ++g)
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) s[g][u] += __shfl_xor_sync(0xffffffffu, s[g][u], offset);
      if (p.scores.more()) finish_scores(key, s);
#pragma unroll
      for (int g = 0; g < kRows; ++g)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int j = key + u * kGroups;
          if (j < from[g] || j >= to[g]) s[g][u] = kMinusInf;
        }
      if (p.mask.custom) hide(key, end, s);
#pragma unroll
      for (int g = 0; g < kRows; ++g) {
        float top = m[g];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) top = fmaxf(top, s[g][u]);
        const float reference = softmax_base(top), factor = softmax_weight<CudaMath>(m[g], reference);
        m[g] = top;
        d[g] *= factor;
#pragma unroll
        for (int i = 0; i < kDims; ++i) o[g][i] *= factor;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          s[g][u] = softmax_weight<CudaMath>(s[g][u], reference);
          d[g] += s[g][u];
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float x[kDims];
        floats(v[u], x);
#pragma unroll
        for (int g = 0; g < kRows; ++g)
#pragma unroll
          for (int i = 0; i < kDims; ++i) o[g][i] += s[g][u] * x[i];
      }
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
#pragma unroll
      for (int i = 0; i < kDims; ++i) shared.o[group][g][dim(i)] = o[g][i];
      if (lane == 0) shared.m[group][g] = m[g], shared.d[group][g] = d[g];
    }
    __syncthreads();
  }

  // The lane groups' states of row g in one, and the weight of each.
  struct Merged {
    float m, d, weight[kGroups];
  };
  FI_DEVICE Merged merge(int g) const {
    Merged all{kMinusInf, 0.f, {}};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) all.m = fmaxf(all.m, shared.m[i][g]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      all.weight[i] = softmax_weight<CudaMath>(shared.m[i][g], softmax_base(all.m));
      all.d += all.weight[i] * shared.d[i][g];
    }
    return all;
  }
  FI_DEVICE float output(const Merged& all, int g, int dim) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) sum += all.weight[i] * shared.o[i][g][dim];
    return sum;
  }

 private:
  FI_DEVICE int dim(int x) const { return (x / 8 * kLanes + lane) * 8 + x % 8; }
  FI_DEVICE uint64_t step(int d) const { return shared.steps[rotary_pair(d, p.dim_qk)]; }

  FI_DEVICE void read(const KV* from, int64_t token, int dims, int j, int end, Eight<KV> (&to)[kSlices]) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int d = dim(slice * 8);
      to[slice].clear();
      if (j < end && d < dims) to[slice].template read<kAligned>(from + j * token + d);
    }
  }

  FI_DEVICE static void floats(const Eight<KV> (&k)[kSlices], float (&x)[kDims]) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) k[slice].floats(x + slice * 8);
  }

  // This lane group's keys, rotated, to where its outputs come later.
  FI_DEVICE void rotate(const KV* keys, int key, int end) {
    __syncwarp();
#pragma unroll 1
    for (int x = lane; x < kUnroll * kWidth; x += kLanes) {
      const int u = x / kWidth, d = x % kWidth, j = key + u * kGroups;
      const auto read = [&](int d) { return to_float(keys[j * p.k_token + d]); };
      shared.o[group][u][d] = j < end && d < p.dim_qk ? rotated(read, d, p.dim_qk, j, step(d)) : 0.f;
    }
    __syncwarp();
  }

  FI_DEVICE void finish_scores(int key, float (&s)[kRows][kUnroll]) const {
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
      const HeadScores scores = shared.scores[g];
      const int i = shared.row[g].i;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        s[g][u] = scores.score<CudaMath>(s[g][u], static_cast<float>(key + u * kGroups - i));
    }
  }

  FI_DEVICE void hide(int key, int end, float (&s)[kRows][kUnroll]) const {
    unsigned hidden = 0;
#pragma unroll 1
    for (int e = 0; e < kRows * kUnroll; ++e) {
      const int j = key + e % kUnroll * kGroups;
      hidden |= static_cast<unsigned>(j < end && !p.mask.keeps(shared.row[e / kUnroll].i, j)) << e;
    }
#pragma unroll
    for (int e = 0; e < kRows * kUnroll; ++e)
      if (hidden >> e & 1) s[e / kUnroll][e % kUnroll] = kMinusInf;
  }
};

}  // namespace fi
