// Batch MLA on Hopper for narrow q tiles of caches in whole pages: 16 packed query rows, wgmma with swapped operands.
// Keys are the 64 rows of the score product, and columns of V those of the output product, so that 16 queries waste no
// tensor cores. A producer warp loads KV tiles by TMA into a ring of parts. Both consumer warpgroups compute all
// scores, and each half of the 512 output columns: they exchange nothing.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/attention/mla/batch_mla_ping_pong_sm90.cuh"  // other caches
#include "fi/attention/mla/mla_merge.cuh"
#include "fi/attention/mla/mla_work_tiles_sm90.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"

namespace fi {

template <class T>
struct MlaSwappedKernel {
  static constexpr int kRows = 16, kKeys = kMlaKvTile;
  static constexpr int kBlocks = kMlaWidth / 64, kLatentBlocks = kMlaLatent / 64;  // of 64 columns
  static constexpr int kHalf = kLatentBlocks / 2;                                  // of a consumer warpgroup
  // A KV tile is three parts of three blocks: the ring holds two and two thirds.
  static constexpr int kParts = 3, kPartBlocks = kBlocks / kParts, kStages = 8;
  static constexpr unsigned kBlockBytes = kKeys * 128, kPartBytes = kPartBlocks * kBlockBytes;
  static constexpr unsigned kQueryBytes = kRows * 128;  // of a block
  static constexpr int kConsumers = 2 * kWarpgroup, kWarps = kConsumers / 32;
  // Batches of fewer KV tiles (100 MB) are the first that L2 evicts; larger ones are slower so
  // (docs/notes/mla-narrow.md).
  static constexpr int kEvictFirstTiles = (100 << 20) / (kKeys * kMlaWidth * 2);

  using Merge = MlaMerge<T, kConsumers, 3, kRows, 4>;
  struct Shared {
    alignas(1024) char kv[kStages][kPartBytes];
    union {
      alignas(1024) char q[kBlocks][kQueryBytes];
      typename Merge::Shared merge;
    };
    alignas(1024) char p[2][kQueryBytes];  // probabilities [16, 64 keys] of each warpgroup
    float tops[2][4][kRows];               // of the warps of a warpgroup
    MlaWork work[2];                       // index -1: no more
    Pipeline<kStages, Writer::kCopies, Reader::kProducts> pipeline;
    Pipeline<2, Writer::kThreads, Reader::kLoads> work_pipeline;
    Barrier q_full, q_empty;
  };

  const BatchMlaParams& params;
  Shared& shared;

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) init();
    __syncthreads();
    pdl_wait();
    if (warpgroup_index() == 0) {
      MlaScheduler scheduler;
      scheduler.enter(params.view(), blockIdx.x);
      if (warp_index() == 0)
        produce(scheduler);
      else
        load_queries(scheduler, static_cast<int>(threadIdx.x) - 32);
    } else {
      consume(warpgroup_index() - 1);
    }
  }

 protected:
  FI_DEVICE void init() const {
    shared.pipeline.init(1, kWarps);
    shared.work_pipeline.init(1, kWarps);
    shared.q_full.init(96);
    shared.q_empty.init(kWarps);
    fence_barrier_init();
    prefetch_tensor_map(params.ckv_map);
    prefetch_tensor_map(params.kpe_map);
  }

  FI_DEVICE int high(const MlaWorkTile& s) const { return params.high(s, s.q_tile * kRows, kRows); }

  // By warp 0.
  FI_DEVICE void produce(MlaScheduler& scheduler) const {
    MlaWork s;
    auto at = PipelineState::producer();
    const int lane = threadIdx.x % 32;
    const uint64_t policy = params.view().header().cost < kEvictFirstTiles ? kEvictFirst : kEvictNormal;
    for (int use = 0; publish_next(scheduler, shared, s, use, lane == 0); ++use) {
      const int high = this->high(s);
      MlaTilePages pages{params, s, high};
      for (int tile = s.begin, i = 0; tile * kKeys < high; ++tile, ++i) {
        pages.advance(i, tile);
        const int here = pages.page_of(i), token = pages.slot_of(i);
#pragma unroll
        for (int n = 0; n < kParts; ++n) {
          if (lane == 0) {
            shared.pipeline.acquire(at);
            Barrier& full = shared.pipeline.expect(at.stage, kPartBytes);
#pragma unroll
            for (int k = 0; k < kPartBlocks; ++k) {
              const int b = n * kPartBlocks + k;
              tma_load_hinted(shared.kv[at.stage] + k * kBlockBytes,
                              b < kLatentBlocks ? params.ckv_map : params.kpe_map, full, policy,
                              b < kLatentBlocks ? b * 64 : 0, token, here);
            }
          }
          at.advance(kStages);
        }
        __syncwarp();
      }
    }
    pdl_launch_dependents();
  }

  // By warps 1 to 3: rows beyond the request become zeros.
  FI_DEVICE void load_queries(MlaScheduler& scheduler, int thread) const {
    MlaWork s;
    for (int use = 0; scheduler.next(s); ++use) {
      shared.q_empty.wait(use % 2 ^ 1);
      load_mla_queries<T, kRows>(params, s, s.q_tile * kRows, shared.q[0], thread, 96);
      shared.q_full.arrive_copies();  // order: thread: every thread arrives for its own copies
    }
  }

  // Of a consumer thread: four rows (queries), and keys 16 w + l / 4 and 8 more of a tile.
  struct Rows {
    int end[4];  // keys that the rows attend to, from the first of the work tile on
    float row_max[4], row_sum[4];
  };
  FI_DEVICE static int row_of(int lane, int c) { return c / 2 * 8 + lane % 4 * 2 + c % 2; }

  FI_DEVICE void consume(int group) const {
    const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
    const uint64_t q = wgmma_uniform(wgmma_operand(shared.q, 1024)), k = wgmma_uniform(wgmma_operand(shared.kv, 1024)),
                   v = wgmma_uniform(wgmma_operand(shared.kv, 1024, kBlockBytes)),
                   prob = wgmma_uniform(wgmma_operand(shared.p[group], 1024));
    unsigned taken = 0;  // parts
    for (int use = 0;; ++use) {
      const auto work_at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(work_at);
      const MlaWorkTile& s = shared.work[work_at.stage];
      if (uniform(s.index) < 0) break;
      const int row0 = s.q_tile * kRows, begin = s.begin * kKeys, high = this->high(s);
      const int tiles = uniform(high > begin ? (high - begin + kKeys - 1) / kKeys : 0);
      Rows rows;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        rows.end[c] = min(params.end_key(s.request, params.row(row0 + row_of(lane, c)).token), high) - begin;
        rows.row_max[c] = kMinusInf, rows.row_sum[c] = 0.f;
      }
      float o[kHalf][8];
#pragma unroll
      for (int m = 0; m < kHalf; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) o[m][i] = 0.f;
      const float scale = params.score_factor();
      shared.q_full.wait(use % 2);
      fence_async_shared();  // order: waiter: rows by cp.async, whose copiers have no fence behind them
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile, taken += kParts) {
        float x[8];
        score(x, q, k, taken);
        release(taken + (group ? 0 : 2));  // the part without values of this warpgroup
        const float4 alpha = softmax(x, rows, scale, tile, group, warp, lane);
        const int left = high - begin - tile * kKeys;
        if (left < kKeys) clear(taken, group, left, thread);
        fence_async_shared();  // order: writer: wgmma reads probabilities and zeros behind the barrier
        warpgroup_sync(1 + group);
        rescale(o, alpha);
        add_values(o, v, prob, taken, group);
        release(taken + (group ? 1 : 0));
        release(taken + (group ? 2 : 1));
      }
      store(s, o, rows, row0, group, warp, lane);
      if (!s.is_whole()) Merge{params, s, shared.merge, static_cast<int>(threadIdx.x) - kWarpgroup, 0, 0}.run();
      __syncwarp();
      if (lane == 0) {
        shared.q_empty.arrive();  // order: lane: behind __syncwarp, and the wait for the last wgmma
        shared.work_pipeline.release(work_at.stage);
      }
    }
  }

  FI_DEVICE void release(unsigned part) const { shared.pipeline.release_warp(part % kStages); }

  // x = k q^T: 64 keys by 16 queries.
  FI_DEVICE void score(float (&x)[8], uint64_t q, uint64_t k, unsigned taken) const {
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const auto at = PipelineState::consumer_at<kStages>(taken + n);
      shared.pipeline.wait(at);
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < kPartBlocks; ++b)
#pragma unroll
        for (int step = 0; step < 4; ++step)
          wgmma(x, wgmma_further(k, at.stage * kPartBytes + b * kBlockBytes + step * 32),
                wgmma_further(q, (n * kPartBlocks + b) * kQueryBytes + step * 32), n + b + step > 0, T(), T());
    }
    wgmma_commit();
    wgmma_finish(x);
  }

  // o += v^T p^T: this warpgroup's 256 columns by 16 queries.
  FI_DEVICE void add_values(float (&o)[kHalf][8], uint64_t v, uint64_t prob, unsigned taken, int group) const {
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kHalf; ++m) {
      const int block = group * kHalf + m, part = block / kPartBlocks;
      const uint64_t values = wgmma_further(
          v, static_cast<unsigned>(taken + part) % kStages * kPartBytes + (block - part * kPartBlocks) * kBlockBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma<false, true>(o[m], wgmma_further(values, step * 2048), wgmma_further(prob, step * 32), true, T(), T());
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < kHalf; ++m) wgmma_keep(o[m]);
  }

  // Scores become probabilities relative to row_max, which go to shared memory as [16, 64 keys]. Returns what rescales
  // the outputs of the thread's rows.
  FI_DEVICE float4 softmax(float (&x)[8], Rows& rows, float scale, int tile, int group, int warp, int lane) const {
    const int key = tile * kKeys + warp * 16 + lane / 4;
    float top[4], alpha[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float& low = x[c / 2 * 4 + c % 2];
      float& high = x[c / 2 * 4 + c % 2 + 2];
      if (key >= rows.end[c]) low = kMinusInf;
      if (key + 8 >= rows.end[c]) high = kMinusInf;
      top[c] = fmaxf(low, high);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2)
        top[c] = fmaxf(top[c], __shfl_xor_sync(0xffffffffu, top[c], offset));
    }
    float (&tops)[4][kRows] = shared.tops[group];
    if (lane < 4) {
      *reinterpret_cast<float2*>(&tops[warp][lane * 2]) = make_float2(top[0], top[1]);
      *reinterpret_cast<float2*>(&tops[warp][8 + lane * 2]) = make_float2(top[2], top[3]);
    }
    __syncwarp();
    warpgroup_sync(1 + group);
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 other = *reinterpret_cast<const float2*>(&tops[w][8 * j + lane % 4 * 2]);
        top[2 * j] = fmaxf(top[2 * j], other.x), top[2 * j + 1] = fmaxf(top[2 * j + 1], other.y);
      }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float keep = kMlaFineSplits ? params.keep_max : kMlaKeepMax;
      const float old = rows.row_max[c], found = top[c] * scale, now = found > old + keep ? found : old;
      const float base = softmax_reference(now);
      alpha[c] = now == old ? 1.f : exp2_approx(old - base);
      rows.row_max[c] = now;
      float& low = x[c / 2 * 4 + c % 2];
      float& high = x[c / 2 * 4 + c % 2 + 2];
      low = exp2_approx(fmaf(low, scale, -base)), high = exp2_approx(fmaf(high, scale, -base));
      rows.row_sum[c] = rows.row_sum[c] * alpha[c] + (low + high);
    }
    unsigned weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = pack_pair(x[2 * i], x[2 * i + 1], T());
    // Matrix i has keys 8 (i % 2) .. of the warp's 16 and queries 8 (i / 2) ..; transposed, a row is a query.
    stmatrix_x4_trans(shared.p[group] + swizzled_offset(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2), weights);
    return make_float4(alpha[0], alpha[1], alpha[2], alpha[3]);
  }

  // Multiplies the output by alpha, which is mostly 1.
  FI_DEVICE static void rescale(float (&o)[kHalf][8], float4 alpha) {
    if (!__any_sync(0xffffffffu, alpha.x != 1.f || alpha.y != 1.f || alpha.z != 1.f || alpha.w != 1.f)) return;
    const float factors[4] = {alpha.x, alpha.y, alpha.z, alpha.w};
#pragma unroll
    for (int m = 0; m < kHalf; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) o[m][i] *= factors[i / 4 * 2 + i % 2];
  }

  // Zeros keys [first, 64) of this warpgroup's values: tokens beyond the last may be NaN.
  FI_DEVICE void clear(unsigned taken, int group, int first, int thread) const {
    for (int i = first * 8 + thread; i < kKeys * 8; i += kWarpgroup)
#pragma unroll
      for (int m = 0; m < kHalf; ++m) {
        const int block = group * kHalf + m, part = block / kPartBlocks;
        *reinterpret_cast<uint4*>(shared.kv[(taken + part) % kStages] + (block - part * kPartBlocks) * kBlockBytes +
                                  i * 16) = uint4{0, 0, 0, 0};
      }
  }

  // The sums of rows over all keys of a KV tile, from those of the threads.
  FI_DEVICE void sum_rows(float (&total)[4], const Rows& rows, int group, int warp, int lane) const {
    float (&sums)[4][kRows] = shared.tops[group];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float sum = rows.row_sum[c];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (lane < 4) sums[warp][row_of(lane, c)] = sum;
    }
    __syncwarp();
    warpgroup_sync(1 + group);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int r = row_of(lane, c);
      total[c] = (sums[0][r] + sums[1][r]) + (sums[2][r] + sums[3][r]);
    }
    warpgroup_sync(1 + group);
  }

  // The epilogue of a work tile.
  FI_DEVICE void store(const MlaWorkTile& s, const float (&o)[kHalf][8], Rows& rows, int row0, int group, int warp,
                       int lane) const {
    float total[4];
    sum_rows(total, rows, group, warp, lane);
    if (!s.is_whole())
      store_partial(s.partial(), o, rows.row_max, total, group, warp, lane);
    else
      store_output(s, o, rows.row_max, total, row0, group, warp, lane);
  }
  FI_DEVICE void store_partial(int slot, const float (&o)[kHalf][8], const float (&row_max)[4], const float (&total)[4],
                               int group, int warp, int lane) const {
    const int column = group * 256 + warp * 16;
    float* out = params.partial_output(slot) + column + lane / 4;
#pragma unroll
    for (int m = 0; m < kHalf; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) out[row_of(lane, i / 4 * 2 + i % 2) * kMlaLatent + m * 64 + i / 2 % 2 * 8] = o[m][i];
    if (group == 0 && warp == 0 && lane < 4)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        reinterpret_cast<float2*>(params.partial_states(slot))[row_of(lane, c)] = make_float2(row_max[c], total[c]);
  }
  FI_DEVICE void store_output(const MlaWorkTile& s, const float (&o)[kHalf][8], float (&row_max)[4], float (&total)[4],
                              int row0, int group, int warp, int lane) const {
    const int column = group * 256 + warp * 16, count = s.request.qo_len * static_cast<int>(params.heads.value);
    float factors[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int r = row0 + row_of(lane, c);
      const auto at = params.row(r < count ? r : 0);
      const int64_t token = s.request.qo_begin + at.token;
      const bool leads = r < count && group == 0 && warp == 0 && lane < 4;
      if (params.score_stats && leads) params.write_stats<CudaMath>(token, at.head, row_max[c], total[c]);
      factors[c] = params.finish<CudaMath>(at.head, row_max[c], total[c]);
      if (params.lse && leads) params.write_lse<CudaMath>(token, at.head, row_max[c], total[c]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = row0 + 8 * j + lane / 4;
      const auto at = params.row(r < count ? r : 0);
      T* out = static_cast<T*>(params.out) + (s.request.qo_begin + at.token) * params.out_token +
               at.head * params.out_head + column + lane % 4 * 2;
#pragma unroll
      for (int m = 0; m < kHalf; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* pair = o[m] + 4 * j + 2 * h;
          const unsigned word = transposed_8x8(pack_pair(pair[0] * factors[2 * j], pair[1] * factors[2 * j + 1], T()));
          if (r < count) *reinterpret_cast<unsigned*>(out + m * 64 + h * 8) = word;
        }
    }
  }
};

template <class T, int kSharedBytes>
FI_DEVICE void batch_mla_swapped(const BatchMlaParams& params) {
  run_in_shared<MlaSwappedKernel<T>, kSwizzlePeriod, kSharedBytes>(params);
}

}  // namespace fi
