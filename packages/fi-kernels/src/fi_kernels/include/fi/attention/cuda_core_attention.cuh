// Attention of a few packed query rows on CUDA cores, in fp32: decode, and types and head dims that tensor cores do not
// support. `lanes` lanes share a key; each holds kSlices * 8 of its dimensions. The lane groups of the CTA process keys
// round-robin, each with its own softmax state, and merge the states once at the end.
#pragma once
#include "fi/attention/paged_kv.cuh"
#include "fi/attention/softmax.h"
#include "fi/attention/variant.h"
#include "fi/attention/vec8.cuh"
#include "fi/cuda/math.cuh"

namespace fi {

template <class Q, class KV, int kSlices, int kRows, class Pages = ContiguousKv>
struct CudaCoreAttention {
  static constexpr int kThreads = 128, kDims = kSlices * 8, kMaxDims = 32 * kDims;
  static constexpr int kMinLanes = kSlices == 1 ? 8 : 32, kMaxGroups = kThreads / kMinLanes;
  static constexpr int kBytes = sizeof(KV) * kSlices;
  static constexpr int kUnroll =
      kBytes < 4 && kRows > 1 ? 4 / kBytes : 1;  // keys a lane group loads before it computes
  static_assert(kUnroll <= kRows, "rotated keys use the memory of the outputs");

  struct Shared {
    float q[kRows][kMaxDims];           // rotated and scaled: a dot product is a score
    float o[kThreads * kRows * kDims];  // [groups][kRows][width], unnormalised, of each lane group
    float row_max[kMaxGroups][kRows], row_sum[kMaxGroups][kRows];
    HeadScores scores[kRows];
    Row row[kRows];
    uint64_t rotary_steps[kMaxDims / 2];  // rotary angles
  };

  const AttentionProblem& p;
  Shared& shared;
  const Pages pages;
  const int kv_head, first, rows;  // of the packed rows
  const int lanes, groups, width;  // a power of two; of the CTA; dimensions of a lane group
  const int lane, group;           // in the lane group; of the CTA

  FI_DEVICE CudaCoreAttention(const AttentionProblem& p, Shared& shared, int kv_head, int first, Pages pages = {})
      : p(p),
        shared(shared),
        pages(pages),
        kv_head(kv_head),
        first(first),
        rows(min(kRows, p.rows() - first)),
        lanes(lanes_for(max(p.head_dim_qk, p.head_dim_vo))),
        groups(kThreads / lanes),
        width(lanes * kDims),
        lane(threadIdx.x & (lanes - 1)),
        group(threadIdx.x / lanes) {}

  FI_DEVICE void load_queries() {
    if (p.rotary.enabled) {
#pragma unroll 1
      for (int k = threadIdx.x; k < p.head_dim_qk / 2; k += kThreads) shared.rotary_steps[k] = p.rotary.step(k);
    }
    if (threadIdx.x < kRows) {  // rows beyond the last repeat the first; their results are not read
      const Row row = p.row(kv_head, first + (threadIdx.x < rows ? threadIdx.x : 0));
      shared.row[threadIdx.x] = row;
      shared.scores[threadIdx.x] = p.head_scores<CudaMath>(row.head);
    }
    __syncthreads();
#pragma unroll 1
    for (int x = threadIdx.x; x < kRows * width; x += kThreads) {
      const int g = x / width, d = x % width;
      const Row at = shared.row[g];
      const Q* q = static_cast<const Q*>(p.q) + at.i * p.q_token + at.head * p.q_head;
      const auto read = [&](int d) { return to_float(q[d]); };
      float value = 0.f;
      if (d < p.head_dim_qk)
        value = p.rotary.enabled ? rotated(read, d, p.head_dim_qk, p.mask.position(at.i), step(d)) : read(d);
      shared.q[g][d] = Variant::kCustom ? value : value * shared.scores[g].scale;
    }
    __syncthreads();
  }

  // Keys [begin, end).
  FI_DEVICE void attend(int begin, int end, Variant& variant) {
    float q[kRows][kDims], o[kRows][kDims] = {}, row_max[kRows], row_sum[kRows];
    int from[kRows], to[kRows];
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
      const int i = shared.row[g].i;
      row_max[g] = Variant::kSoftmax ? kMinusInf : 0.f, row_sum[g] = 0.f;
      from[g] = p.mask.first_key(i), to[g] = min(end, p.mask.end_key(i));
#pragma unroll
      for (int x = 0; x < kDims; ++x) q[g][x] = shared.q[g][dim(x)];
    }
    const KV* keys = static_cast<const KV*>(p.k) + kv_head * p.k_head;
    const KV* values = static_cast<const KV*>(p.v) + kv_head * p.v_head;
#pragma unroll 1
    for (int base = begin; base < end; base += groups * kUnroll) {
      const int key = base + group;  // and every `groups` keys from there
      Vec8<KV> k[kUnroll][kSlices], v[kUnroll][kSlices];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int j = key + u * groups;
        const bool inside = j < end;
        const int64_t page = inside ? pages.page(j) : 0, slot = inside ? pages.slot(j) : 0;
        const int64_t v_page = !kSplitTables ? page : inside ? pages.v_page_of(j) : 0;
        read(keys + page * pages.k_page + slot * p.k_token, key_scales(page, slot), p.head_dim_qk, inside, k[u]);
        read(values + v_page * pages.v_page + slot * p.v_token, value_scales(v_page, slot), p.head_dim_vo, inside,
             v[u]);
      }
      if (p.rotary.enabled) rotate(keys, key, end);
      float s[kRows][kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float x[kDims];
        floats(k[u], x);
        if (p.rotary.enabled) {
#pragma unroll
          for (int i = 0; i < kDims; ++i) x[i] = output(group, u)[dim(i)];
        }
#pragma unroll
        for (int g = 0; g < kRows; ++g) {
          s[g][u] = 0.f;
#pragma unroll
          for (int i = 0; i < kDims; ++i) s[g][u] += q[g][i] * x[i];
        }
      }
#pragma unroll 1
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (int g = 0; g < kRows; ++g)
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) s[g][u] += __shfl_xor_sync(0xffffffffu, s[g][u], offset);
      }
      if constexpr (Variant::kCustom) apply_variant(key, from, to, s, variant);
      if (Variant::kCustom ? p.mask.selects() : p.special()) transform_scores(key, end, s);
#pragma unroll
      for (int g = 0; g < kRows; ++g)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int j = key + u * groups;
          if (j < from[g] || j >= to[g]) s[g][u] = Variant::kHidden;
        }
      if constexpr (Variant::kSoftmax) update_softmax(s, row_max, row_sum, o);
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
      for (int i = 0; i < kDims; ++i) output(group, g)[dim(i)] = o[g][i];
      if (lane == 0) shared.row_max[group][g] = row_max[g], shared.row_sum[group][g] = row_sum[g];
    }
    __syncthreads();
  }

  // Of row g over all lane groups: its state, and one dimension of its unnormalised output.
  FI_DEVICE float merged_max(int g) const {
    float row_max = kMinusInf;
#pragma unroll 1
    for (int i = 0; i < groups; ++i) row_max = fmaxf(row_max, shared.row_max[i][g]);
    return row_max;
  }
  FI_DEVICE float rescale(int i, int g, float row_max) const {
    return softmax_exp2<CudaMath>(shared.row_max[i][g], softmax_reference(row_max));
  }
  FI_DEVICE float merged_sum(int g, float row_max) const {
    float row_sum = 0.f;
#pragma unroll 1
    for (int i = 0; i < groups; ++i) row_sum += rescale(i, g, row_max) * shared.row_sum[i][g];
    return row_sum;
  }
  FI_DEVICE float merged_output(int g, float row_max, int dim) const {
    float sum = 0.f;
#pragma unroll 1
    for (int i = 0; i < groups; ++i) sum += rescale(i, g, row_max) * output(i, g)[dim];
    return sum;
  }

 private:
  FI_DEVICE static int lanes_for(int dims) {
    int lanes = kMinLanes;
    if (lanes * kDims < dims) lanes *= 2;
    if (lanes * kDims < dims) lanes *= 2;
    return lanes;
  }
  FI_DEVICE int dim(int x) const { return (x / 8 * lanes + lane) * 8 + x % 8; }
  FI_DEVICE float* output(int group, int g) const { return shared.o + (group * kRows + g) * width; }
  FI_DEVICE uint64_t step(int d) const { return shared.rotary_steps[rotary_pair(d, p.head_dim_qk)]; }

  // The scales of a key or value; null but for NVFP4.
  FI_DEVICE const uint8_t* key_scales(int64_t page, int64_t slot) const {
    if constexpr (!kIsE2m1<KV>) return nullptr;
    return p.kv_scales.k + page * p.kv_scales.k_page + slot * p.kv_scales.k_token + kv_head * p.kv_scales.k_head;
  }
  FI_DEVICE const uint8_t* value_scales(int64_t page, int64_t slot) const {
    if constexpr (!kIsE2m1<KV>) return nullptr;
    return p.kv_scales.v + page * p.kv_scales.v_page + slot * p.kv_scales.v_token + kv_head * p.kv_scales.v_head;
  }
  FI_DEVICE void read(const KV* from, const uint8_t* scales, int dims, bool inside, Vec8<KV> (&to)[kSlices]) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int d = dim(slice * 8);
      to[slice].clear();
      if (!inside || d >= dims) continue;
      if constexpr (kIsE2m1<KV>)
        to[slice].read(from + d / 2, scales + d / 16, p.aligned);
      else
        to[slice].read(from + d, p.aligned);
    }
  }

  FI_DEVICE static void floats(const Vec8<KV> (&k)[kSlices], float (&x)[kDims]) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) k[slice].floats(x + slice * 8);
  }

  // Stores the rotated keys of this lane group in the memory of its outputs.
  FI_DEVICE void rotate(const KV* keys, int key, int end) const {
    __syncwarp();
#pragma unroll 1
    for (int x = lane; x < kUnroll * width; x += lanes) {
      const int u = x / width, d = x % width, j = key + u * groups;
      const bool inside = j < end && d < p.head_dim_qk;
      const int64_t page = inside ? pages.page(j) : 0, slot = inside ? pages.slot(j) : 0;
      const KV* from = keys + page * pages.k_page + slot * p.k_token;
      const auto read = [&](int d) { return kv_element(from, key_scales(page, slot), d); };
      output(group, u)[d] = inside ? rotated(read, d, p.head_dim_qk, j, step(d)) : 0.f;
    }
    __syncwarp();
  }

  // One step of the online softmax: replaces scores by exp2(score - row_max), and rescales row_sum and o.
  FI_DEVICE static void update_softmax(float (&s)[kRows][kUnroll], float (&row_max)[kRows], float (&row_sum)[kRows],
                                       float (&o)[kRows][kDims]) {
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
      float new_max = row_max[g];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) new_max = fmaxf(new_max, s[g][u]);
      const float reference = softmax_reference(new_max), rescale = softmax_exp2<CudaMath>(row_max[g], reference);
      row_max[g] = new_max;
      row_sum[g] *= rescale;
#pragma unroll
      for (int i = 0; i < kDims; ++i) o[g][i] *= rescale;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        s[g][u] = softmax_exp2<CudaMath>(s[g][u], reference);
        row_sum[g] += s[g][u];
      }
    }
  }

  // Computes the scores of a variant, for the keys that each row sees.
  FI_DEVICE void apply_variant(int key, const int (&from)[kRows], const int (&to)[kRows], float (&s)[kRows][kUnroll],
                               Variant& variant) const {
#pragma unroll
    for (int g = 0; g < kRows; ++g)
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int j = key + u * groups;
        const bool seen = g < rows && j >= from[g] && j < to[g];
        s[g][u] = seen ? variant.score(s[g][u], shared.row[g], kv_head, j) : Variant::kHidden;
      }
  }

  // Soft cap, ALiBi and custom mask: rare, so a loop through shared memory keeps the code short. It uses the memory of
  // the rotated keys, which are no longer needed.
  FI_DEVICE void transform_scores(int key, int end, float (&s)[kRows][kUnroll]) const {
    float* slot = output(group, 0) + lane;
    __syncwarp();
#pragma unroll
    for (int e = 0; e < kRows * kUnroll; ++e) slot[e * lanes] = s[e / kUnroll][e % kUnroll];
#pragma unroll 1
    for (int e = 0; e < kRows * kUnroll; ++e) {
      const int g = e / kUnroll, i = shared.row[g].i, j = key + e % kUnroll * groups;
      if (j >= end) continue;
      float score = slot[e * lanes];
      if constexpr (!Variant::kCustom)
        score = shared.scores[g].template score<CudaMath>(score, static_cast<float>(j - i));
      slot[e * lanes] = p.mask.keeps(i, j) ? score : Variant::kHidden;
    }
#pragma unroll
    for (int e = 0; e < kRows * kUnroll; ++e) s[e / kUnroll][e % kUnroll] = slot[e * lanes];
    __syncwarp();
  }
};

}  // namespace fi
