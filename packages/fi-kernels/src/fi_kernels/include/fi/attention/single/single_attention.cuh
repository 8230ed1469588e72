// Single-request attention on sm_80 and later: tensor-core tiles for prefill, CUDA cores with split keys for decode.
#pragma once
#include "fi/attention/cuda_core_attention.cuh"
#include "fi/attention/mma_attention.cuh"
#include "fi/attention/single/single_attention.h"
#include "fi/cuda/reduce.cuh"

namespace fi {

// By all threads of the CTA. `shared`: in shared memory.
FI_DEVICE Variant begin_variant(Variant::Params& shared, const Variant::Arguments& arguments,
                                const AttentionProblem& p) {
  if constexpr (Variant::kCustom) {
    if (threadIdx.x == 0) shared.set(arguments, p);
    __syncthreads();
  }
  return {shared, 0};
}

// Grid: (tiles of packed rows, kv heads, column tiles of the output); the longest rows of a causal mask first.
template <class T, class Q, class KV, class Shape, int kSharedBytes>
FI_DEVICE void single_attention_mma(const SingleAttentionParams& params, const Variant::Arguments& arguments = {}) {
  using Kernel = MmaAttention<T, Q, KV, ContiguousKv, Shape>;
  __shared__ AttentionProblem problem;
  __shared__ QueryTile tile;
  __shared__ ContiguousKv pages;
  __shared__ Variant::Params variant_params;
  pdl_wait();
  if (threadIdx.x == 0) {
    problem = params.problem;
    const int first = (gridDim.x - 1 - blockIdx.x) * Kernel::kRows, rows = problem.rows() - first;
    tile = {0, static_cast<int>(blockIdx.y), first, min(Kernel::kRows, rows),
            static_cast<int>(blockIdx.z) * Kernel::kColumns};
  }
  __syncthreads();
  Variant variant = begin_variant(variant_params, arguments, problem);
  Kernel kernel(problem, dynamic_shared<typename Kernel::Shared, 128, kSharedBytes>(), tile, pages);
  kernel.attend(variant, false, [] {});
  pdl_launch_dependents();
  kernel.store(variant);
}

// Grid: (groups of kRows packed rows, kv heads, splits).
template <class Q, class KV, int kSlices, int kRows>
FI_DEVICE void single_attention_cuda_core(const SingleAttentionParams& params,
                                          const Variant::Arguments& arguments = {}) {
  using Kernel = CudaCoreAttention<Q, KV, kSlices, kRows>;
  __shared__ typename Kernel::Shared shared;
  const AttentionProblem& p = params.problem;
  const int kv_head = blockIdx.y, first = blockIdx.x * kRows;
  Kernel kernel(p, shared, kv_head, first);
  pdl_wait();
  __shared__ Variant::Params variant_params;
  Variant variant = begin_variant(variant_params, arguments, p);
  kernel.load_queries();
  const KeyRange all{p.mask.first_key(shared.row[0].i), p.mask.end_key(shared.row[kernel.rows - 1].i)};
  const KeyRange keys = split_keys(all, blockIdx.z, params.num_splits);
  kernel.attend(keys.begin, keys.end, variant);
  pdl_launch_dependents();
#pragma unroll 1
  for (int g = 0; g < kernel.rows; ++g) {
    const Row row = shared.row[g];
    const float merged_max = kernel.merged_max(g), merged_sum = kernel.merged_sum(g, merged_max);
    const bool split = params.num_splits > 1;
    float row_max = merged_max, row_sum = merged_sum;
    const auto output = variant.end(row, row_max, row_sum, p.value_scale(kv_head));
    float* to = split ? params.partial(blockIdx.z, row) : nullptr;
    const int64_t out = row.i * p.out_token + row.head * p.out_head;
#pragma unroll 1
    for (int x = threadIdx.x; x < p.head_dim_vo; x += Kernel::kThreads) {
      const float y = kernel.merged_output(g, merged_max, x);
      if (split)
        to[x] = y;
      else
        store_output(p.out, p.out_type, out + x, output(y));
    }
    if (threadIdx.x > 0) continue;
    if (split)
      to[p.head_dim_vo] = merged_max, to[p.head_dim_vo + 1] = merged_sum;
    else if (p.lse)
      p.lse[static_cast<int64_t>(row.i) * p.qo_heads + row.head] = softmax_lse<CudaMath>(row_max, row_sum);
  }
}

// Grid: one CTA per row (i, head). Merges the partials of its splits.
FI_DEVICE void combine_chunks(const SingleAttentionParams& params, const Variant::Arguments& arguments = {}) {
  constexpr int kMaxSplits = 1024;
  __shared__ float weight[kMaxSplits];
  const AttentionProblem& p = params.problem;
  const Row row{static_cast<int32_t>(blockIdx.x) / p.qo_heads, static_cast<int32_t>(blockIdx.x) % p.qo_heads};
  const int lane = threadIdx.x % 32;
  pdl_wait();
  __shared__ Variant::Params variant_params;
  Variant variant = begin_variant(variant_params, arguments, p);
  const float* partial = params.partial(0, row);
  const int64_t next = params.partial(1, row) - partial;
  float row_max = kMinusInf, row_sum = 0.f;  // every warp computes the same
#pragma unroll 1
  for (int c = lane; c < params.num_splits; c += 32) row_max = fmaxf(row_max, partial[c * next + p.head_dim_vo]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, offset));
#pragma unroll 1
  for (int c = lane; c < params.num_splits; c += 32) {
    const float w = softmax_exp2<CudaMath>(partial[c * next + p.head_dim_vo], softmax_reference(row_max));
    row_sum += w * partial[c * next + p.head_dim_vo + 1];
    if (threadIdx.x < 32) weight[c] = w;
  }
  row_sum = warp_sum(row_sum);
  pdl_launch_dependents();
  __syncthreads();
  const auto output = variant.end(row, row_max, row_sum, p.value_scale(row.head / p.group()));
  const int64_t out = row.i * p.out_token + row.head * p.out_head;
#pragma unroll 1
  for (int x = threadIdx.x; x < p.head_dim_vo; x += blockDim.x) {
    float sum = 0.f;
    const float* value = partial + x;
#pragma unroll 4
    for (int c = 0; c < params.num_splits; ++c, value += next) sum += weight[c] * *value;
    store_output(p.out, p.out_type, out + x, output(sum));
  }
  if (threadIdx.x == 0 && p.lse)
    p.lse[static_cast<int64_t>(row.i) * p.qo_heads + row.head] = softmax_lse<CudaMath>(row_max, row_sum);
}

}  // namespace fi
