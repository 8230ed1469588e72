// Unit kernels of the device building blocks for Hopper, and a persistent warp-specialised GEMM made of nothing else.
#include "blocks.h"
#include "fi/cuda/epilogue_sm90.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/tile_scheduler.cuh"
#include "fi/cuda/tma_tile_sm90.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"

using Bf16 = __nv_bfloat16;
using E4m3 = __nv_fp8_e4m3;

// Doubles a [m, 128] bf16 matrix: TMA producer warp -> swizzled stages -> registers -> epilogue -> TMA store or rows.
// One CTA walks all tiles of 64 rows, so that the ring of three stages goes round several times.
struct CopyShared {
  static constexpr int kStages = 3, kTile = 64 * 128;
  alignas(1024) Bf16 in[kStages][kTile];
  alignas(1024) Bf16 out[kTile];
  fi::Pipeline<kStages> pipeline;
};
template <bool kTmaStore>
__device__ void copy_tiles(const BlockParams& p) {
  using Tile = fi::SwizzledTile<Bf16, 64>;
  auto& shared = fi::dynamic_shared<CopyShared, fi::kSwizzlePeriod, sizeof(CopyShared) + 1024>();
  const int tiles = (p.m + 63) / 64, thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    shared.pipeline.init(1, 128);
    fi::fence_barrier_init();
  }
  __syncthreads();
  if (fi::warpgroup_index() == 1) {
    if (thread > 0) return;
    auto at = fi::PipelineState::producer();
    for (int tile = 0; tile < tiles; ++tile, at.advance(CopyShared::kStages)) {
      shared.pipeline.acquire(at);
      fi::Barrier& full = shared.pipeline.expect(at.stage, CopyShared::kTile * sizeof(Bf16));
      fi::tma_load_tile<128>(shared.in[at.stage], 64 * 64, p.a_map, full, 0, tile * 64);
    }
    return;
  }
  fi::PipelineState at;
  for (int tile = 0; tile < tiles; ++tile, at.advance(CopyShared::kStages)) {
    float d[64];
    shared.pipeline.wait(at);
    const char* in = reinterpret_cast<const char*>(shared.in[at.stage]);
    for (int i = 0; i < 64; ++i) {
      const int row = fi::wgmma_row(thread) + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      d[i] = __bfloat162float(*reinterpret_cast<const Bf16*>(in + Tile::offset(row, column)));
    }
    shared.pipeline.release(at.stage);
    if (kTmaStore && thread == 0) fi::bulk_wait_read<0>();
    fi::warpgroup_sync(1);
    fi::stage_accumulators<Bf16, 64>(shared.out, 0, d, [](float x, int, int) { return 2.f * x; });
    if (kTmaStore) {
      fi::fence_async_shared();
      fi::warpgroup_sync(1);
      if (thread == 0) {
        fi::tma_store_tile<128>(p.out_map, shared.out, 64 * 64, 0, tile * 64);
        fi::bulk_commit();
      }
    } else {
      __syncwarp();
      Bf16* out = reinterpret_cast<Bf16*>(p.out);
      fi::store_staged_rows<Bf16, 64, 128>(shared.out, 0, p.n, [&](int row) {
        return tile * 64 + row < p.m ? out + static_cast<fi::int64_t>(tile * 64 + row) * p.n : nullptr;
      });
    }
  }
  if (kTmaStore && thread == 0) fi::bulk_wait_read<0>();
}
extern "C" __global__ void __launch_bounds__(256) copy_tma_store(const __grid_constant__ BlockParams p) {
  copy_tiles<true>(p);
}
extern "C" __global__ void __launch_bounds__(256) copy_row_store(const __grid_constant__ BlockParams p) {
  copy_tiles<false>(p);
}

// Copies m * 128 floats through a shared-memory pipeline: four warps fill a stage with cp.async, a warpgroup frees it.
extern "C" __global__ void __launch_bounds__(256) copy_cp_async(const __grid_constant__ BlockParams p) {
  constexpr int kStages = 2, kTile = 128 * 4;  // floats: 16 bytes of each producer thread
  __shared__ alignas(16) float ring[kStages][kTile];
  __shared__ fi::Pipeline<kStages> pipeline;
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
extern "C" __global__ void __launch_bounds__(32) visit_static(const __grid_constant__ BlockParams p) {
  const fi::GroupedRaster raster{p.m, p.n, p.group_m};
  if (threadIdx.x > 0) return;
  for (fi::StaticTileScheduler scheduler(raster.tiles()); !scheduler.done(); scheduler.advance())
    visit(p, raster, scheduler.tile);
}
extern "C" __global__ void __launch_bounds__(32) visit_dynamic(const __grid_constant__ BlockParams p) {
  const fi::GroupedRaster raster{p.m, p.n, p.group_m};
  if (threadIdx.x > 0) return;
  for (int tile = blockIdx.x; tile < raster.tiles(); tile = fi::take_tile(&p.counters[0]) + gridDim.x)
    visit(p, raster, tile);
  fi::retire_cta(&p.counters[0], &p.counters[1]);
}

// out [m, n] bf16 = a [m, k] b [n, k]^T: one producer warpgroup, two consumer warpgroups of 64 rows each.
struct GemmKernel {
  static constexpr int kStages = 4, kM = 128, kN = 128, kK = 64;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(fi::registers_fit(kProducerRegisters + 2 * kConsumerRegisters, 3), "registers");
  struct Shared {
    alignas(1024) Bf16 a[kStages][kM * kK];
    alignas(1024) Bf16 b[kStages][kN * kK];
    alignas(1024) Bf16 out[kM * kN];
    fi::Pipeline<kStages> pipeline;
  };
  const BlockParams& p;
  Shared& shared;

  __device__ void run() const {
    const fi::GroupedRaster raster{(p.m + kM - 1) / kM, (p.n + kN - 1) / kN, p.group_m};
    const int steps = (p.k + kK - 1) / kK, group = fi::warpgroup_index();
    if (threadIdx.x == 0) {
      shared.pipeline.init(1, 2);
      fi::fence_barrier_init();
      fi::prefetch_tensor_map(p.a_map);
      fi::prefetch_tensor_map(p.b_map);
    }
    __syncthreads();
    fi::pdl_wait();
    if (group == 0) {
      fi::give_registers<kProducerRegisters>();
      if (threadIdx.x > 0) return;
      auto at = fi::PipelineState::producer();
      for (fi::StaticTileScheduler scheduler(raster.tiles()); !scheduler.done(); scheduler.advance()) {
        const auto tile = raster.at(scheduler.tile);
        for (int step = 0; step < steps; ++step, at.advance(kStages)) {
          shared.pipeline.acquire(at);
          fi::Barrier& full = shared.pipeline.expect(at.stage, (kM + kN) * kK * sizeof(Bf16));
          fi::tma_load_tile<kK>(shared.a[at.stage], kM * 64, p.a_map, full, step * kK, tile.m * kM);
          fi::tma_load_tile<kK>(shared.b[at.stage], kN * 64, p.b_map, full, step * kK, tile.n * kN);
        }
      }
      return;
    }
    fi::take_registers<kConsumerRegisters>();
    const int first_row = (group - 1) * 64, thread = threadIdx.x % 128;
    fi::PipelineState at;
    for (fi::StaticTileScheduler scheduler(raster.tiles()); !scheduler.done(); scheduler.advance()) {
      const auto tile = raster.at(scheduler.tile);
      float d[kN / 2];
      for (int step = 0; step < steps; ++step, at.advance(kStages)) {
        shared.pipeline.wait(at);
        fi::wgmma_shared<Bf16, kK>(d, fi::wgmma_operand(shared.a[at.stage] + first_row * 64, 1024), 0,
                                   fi::wgmma_operand(shared.b[at.stage], 1024), 0, step > 0);
        fi::wgmma_finish(d);
        if (thread == 0) shared.pipeline.release(at.stage);
      }
      if (thread == 0) fi::bulk_wait_read<0>();  // the last tile has left shared memory
      fi::warpgroup_sync(group);
      fi::stage_accumulators<Bf16, kM>(shared.out, first_row, d, [](float x, int, int) { return x; });
      fi::fence_async_shared();
      fi::warpgroup_sync(group);
      if (thread == 0) {
        fi::tma_store_tile<kN>(p.out_map, shared.out + first_row * 64, kM * 64, tile.n * kN, tile.m * kM + first_row);
        fi::bulk_commit();
      }
    }
    if (thread == 0) fi::bulk_wait_read<0>();
  }
};
extern "C" __global__ void __launch_bounds__(384) gemm_bf16(const __grid_constant__ BlockParams p) {
  fi::run_in_shared<GemmKernel, fi::kSwizzlePeriod, sizeof(GemmKernel::Shared) + 1024>(p);
}
