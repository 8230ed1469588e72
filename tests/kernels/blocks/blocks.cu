// Unit kernels of the device building blocks for Hopper.
#include "blocks.h"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/tile_scheduler.cuh"
#include "fi/cuda/tma_tile_sm90.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"

using Bf16 = __nv_bfloat16;
using E4m3 = __nv_fp8_e4m3;

// Copies m * 128 floats through a shared-memory pipeline: four warps fill a stage with cp.async, a warpgroup frees it.
extern "C" __global__ void __launch_bounds__(256) copy_cp_async(const __grid_constant__ BlockParams p) {
  constexpr int kStages = 2, kTile = 128 * 4;  // floats: 16 bytes of each producer thread
  __shared__ alignas(16) float ring[kStages][kTile];
  __shared__ fi::Pipeline<kStages, fi::Writer::kThreads, fi::Reader::kLoads> pipeline;
  if (threadIdx.x == 0) {
    pipeline.init(128, 128);
    fi::fence_barrier_init();
  }
  __syncthreads();
  const int thread = threadIdx.x % 128, tiles = p.m * p.n / kTile;
  const float* a = static_cast<const float*>(p.a);
  if (fi::warpgroup_index() == 1) {
    for (int tile = 0; tile < tiles; ++tile) {
      const auto at = fi::PipelineState::producer_at<kStages>(tile);
      pipeline.acquire(at);
      fi::cp_async_16(&ring[at.stage][thread * 4], a + tile * kTile + thread * 4);
      pipeline.commit_copies(at.stage);
    }
    fi::cp_async_wait<0>();
    return;
  }
  for (int tile = 0; tile < tiles; ++tile) {
    const auto at = fi::PipelineState::consumer_at<kStages>(tile);
    pipeline.wait(at);
    for (int i = thread; i < kTile; i += 128) p.out[tile * kTile + i] = ring[at.stage][(i + 4) % kTile];
    pipeline.release(at.stage);
  }
}

// out [64, 128] fp32 = a [64, k] b^T, one tile of 128 bytes of columns, or of two.
template <class T, int kColumns>
__device__ void wgmma_tile(const BlockParams& p) {
  constexpr int kBlock = 128 / sizeof(T);
  struct Shared {
    alignas(1024) T a[64 * kColumns];
    alignas(1024) T b[128 * kColumns];
    fi::Barrier full;
  };
  auto& shared = fi::dynamic_shared<Shared, fi::kSwizzlePeriod, sizeof(Shared) + 1024>();
  if (threadIdx.x == 0) {
    shared.full.init(1);
    fi::fence_barrier_init();
    shared.full.arrive_expect((64 + 128) * kColumns * sizeof(T));
    fi::tma_load_tile<kColumns>(shared.a, 64 * kBlock, p.a_map, shared.full, 0, 0);
    fi::tma_load_tile<kColumns>(shared.b, 128 * kBlock, p.b_map, shared.full, 0, 0);
  }
  __syncthreads();
  shared.full.wait(0);
  float d[64];
  fi::wgmma_shared<T, kColumns>(d, fi::wgmma_operand(shared.a, 1024), 64 * 128, fi::wgmma_operand(shared.b, 1024),
                                128 * 128);
  fi::wgmma_finish(d);
  for (int i = 0; i < 64; ++i) {
    const int row = fi::wgmma_row(threadIdx.x) + i / 2 % 2 * 8, column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    p.out[row * 128 + column] = d[i];
  }
}
extern "C" __global__ void __launch_bounds__(128) wgmma_bf16(const __grid_constant__ BlockParams p) {
  wgmma_tile<Bf16, 128>(p);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_e4m3(const __grid_constant__ BlockParams p) {
  wgmma_tile<E4m3, 256>(p);
}

// out [64, 128] fp32 = a b with a [64, 64] bf16 in registers and b [64, 128] MN-major: the product of weights and
// values.
extern "C" __global__ void __launch_bounds__(128) wgmma_registers(const __grid_constant__ BlockParams p) {
  struct Shared {
    alignas(1024) Bf16 b[64 * 128];
    fi::Barrier full;
  };
  auto& shared = fi::dynamic_shared<Shared, fi::kSwizzlePeriod, sizeof(Shared) + 1024>();
  if (threadIdx.x == 0) {
    shared.full.init(1);
    fi::fence_barrier_init();
    shared.full.arrive_expect(sizeof(shared.b));
    fi::tma_load_tile<128>(shared.b, 64 * 64, p.b_map, shared.full, 0, 0);
  }
  unsigned a[4][4];
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 4; ++i) {
      const int row = fi::wgmma_row(threadIdx.x) + i % 2 * 8, column = step * 16 + i / 2 * 8 + threadIdx.x % 4 * 2;
      a[step][i] = *reinterpret_cast<const unsigned*>(static_cast<const Bf16*>(p.a) + row * 64 + column);
    }
  __syncthreads();
  shared.full.wait(0);
  float d[64];
  fi::wgmma_registers<Bf16>(d, a, fi::wgmma_operand(shared.b, 1024, 64 * 128), 2 * 1024, false);
  fi::wgmma_finish(d);
  for (int i = 0; i < 64; ++i) {
    const int row = fi::wgmma_row(threadIdx.x) + i / 2 % 2 * 8, column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    p.out[row * 128 + column] = d[i];
  }
}

// Counts how often each tile of m x n tiles is visited.
__device__ void visit(const BlockParams& p, const fi::GroupedRaster& raster, int tile) {
  const auto at = raster.at(tile);
  atomicAdd(&p.counters[2 + at.m * raster.n_tiles + at.n], 1);
}
extern "C" __global__ void __launch_bounds__(32) visit_dynamic(const __grid_constant__ BlockParams p) {
  const fi::GroupedRaster raster{p.m, p.n, p.group_m};
  if (threadIdx.x > 0) return;
  for (int tile = blockIdx.x; tile < raster.tiles(); tile = fi::take_tile(&p.counters[0]) + gridDim.x)
    visit(p, raster, tile);
  fi::retire_cta(&p.counters[0], &p.counters[1]);
}
