// GEMM for few tokens and few rows of weights on Hopper, which does not split k: a CTA owns a part of the 64 rows that
// wgmma multiplies, so that many CTAs stream the weights. Of 16-bit operands without scales.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/gemm/gemm_small_m_sm90.cuh"

namespace fi {

// A tile has kTokens rows of a by kOwnRows rows of b, up to 32. What the other rows of the operand in shared memory
// hold reaches only sums that nobody stores. k is added as by the other kernels that do not split it.
template <class T, class Out, int kTokens, int kOwnRows, int kBlocks, int kStages>
struct GemmNarrow {
  using Mainloop = SmallMMainloop<T, T, kTokens, 1, kBlocks, kStages, 0>;
  static constexpr int kConsumers = 128, kLine = kSwizzleLineBytes, kBlockK = kLine / sizeof(T);
  static_assert(sizeof(T) == 2 && kOwnRows % 8 == 0 && kOwnRows <= 32, "rows of the first two warps");

  struct Shared {
    typename Mainloop::Operands operands;
    typename Mainloop::Scales scales;
    typename Mainloop::Ring pipeline;
  };

  const GemmSm90Params& p;
  Shared& shared;
  int steps, tiles;

  FI_DEVICE GemmNarrow(const GemmSm90Params& params, Shared& s)
      : p(params),
        shared(s),
        steps((p.k_blocks + kBlocks - 1) / kBlocks),
        tiles((p.problem.n + kOwnRows - 1) / kOwnRows) {}

  FI_DEVICE void run() {
    if (threadIdx.x == kConsumers) {
      prefetch_tensor_map(p.b);
      prefetch_tensor_map(p.a);
      shared.pipeline.init(1, Mainloop::kReleases);
      fence_barrier_init();
    }
    __syncthreads();
    pdl_wait();
    if (threadIdx.x < kConsumers)
      consume();
    else
      load();
  }

 private:
  // By a warp.
  FI_DEVICE void load() {
    pdl_launch_dependents();
    if (threadIdx.x != kConsumers) return;
    const uint64_t policy = p.b_once ? kEvictFirst : kEvictNormal;
    PipelineState at = PipelineState::producer();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
      for (int i = 0; i < steps; ++i, at.advance(kStages)) {
        shared.pipeline.acquire(at);
        Barrier& full = shared.pipeline.expect(at.stage, kBlocks * (kOwnRows + kTokens) * kLine);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const int k = (i * kBlocks + block) * kBlockK;
          tma_load_hinted(shared.operands.b[at.stage][block], p.b, full, policy, k, tile * kOwnRows, 0);
          tma_load_hinted(shared.operands.a[at.stage][block], p.a, full, kEvictLast, k, 0, 0);
        }
      }
  }

  FI_DEVICE void consume() {
    Mainloop mainloop(shared.operands, shared.scales, shared.pipeline, steps);
    PipelineState at;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float sum[Mainloop::kCount];
      mainloop.run(sum, at);
      store(tile * kOwnRows, sum);
    }
  }

  // By a warp: fragments of 8 rows by 8 tokens, as SmallMOutput has them.
  FI_DEVICE void store(int first, const float (&sum)[Mainloop::kCount]) const {
    const GemmProblem& q = p.problem;
    const int lane = threadIdx.x % 32, end = min(first + kOwnRows, q.n);
    const bool pairs = p.whole_rows && q.n % 2 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int block = warp_index() * 16 + h * 8;
      if (block >= kOwnRows) return;
      const int row = first + block + lane / 4;
      const float bias = q.bias && row < end ? to_float(static_cast<const Out*>(q.bias)[row]) : 0.f;
#pragma unroll
      for (int g = 0; g < kTokens / 8; ++g) {
        if (g * 8 >= q.m) break;
        const float x = sum[g * 4 + h * 2] + bias, y = sum[g * 4 + h * 2 + 1] + bias;
        if constexpr (sizeof(Out) == 2) {
          const unsigned pair = movmatrix_trans(pack_pair(x, y, Out()));
          const int token = g * 8 + lane / 4, n = first + block + lane % 4 * 2;
          Out* out = static_cast<Out*>(q.out) + token * q.out_row_stride + n;
          if (token >= q.m || n >= end) continue;
          if (pairs) {
            *reinterpret_cast<unsigned*>(out) = pair;
          } else {
            out[0] = reinterpret_cast<const Out*>(&pair)[0];
            if (n + 1 < end) out[1] = reinterpret_cast<const Out*>(&pair)[1];
          }
        } else {
          const int token = g * 8 + lane % 4 * 2;
          Out* out = static_cast<Out*>(q.out) + token * q.out_row_stride + row;
          if (row < end && token < q.m) out[0] = x;
          if (row < end && token + 1 < q.m) out[q.out_row_stride] = y;
        }
      }
    }
  }
};

// kBytes: of shared memory that the launch requests.
template <class T, class Out, int kTokens, int kOwnRows, int kBlocks, int kStages, int kBytes>
FI_DEVICE void gemm_narrow_sm90(const GemmSm90Params& p) {
  using Kernel = GemmNarrow<T, Out, kTokens, kOwnRows, kBlocks, kStages>;
  Kernel(p, dynamic_shared<typename Kernel::Shared, 1024, kBytes>()).run();
}

}  // namespace fi
