// Batch MLA on Hopper for narrow q tiles with splits at fixed positions: the kernel with swapped operands, which folds
// chunks of kMlaFineTiles KV tiles in registers. Their sums, and those of kMlaChunkTiles, are the same wherever a
// schedule cuts a request. Pages of any size are copied in boxes of tokens that all lie in one page.
#pragma once
#include "fi/attention/mla/batch_mla_swapped_sm90.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

template <class T>
struct MlaFineKernel : MlaSwappedKernel<T> {
  using Base = MlaSwappedKernel<T>;
  using Base::kBlockBytes, Base::kHalf, Base::kKeys, Base::kLatentBlocks, Base::kPartBlocks, Base::kPartBytes,
      Base::kParts, Base::kRows, Base::kStages, Base::kWarps;
  using Base::params, Base::shared;
  using typename Base::Merge;
  using typename Base::Rows;
  using typename Base::Shared;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static_assert(registers_fit(kProducerRegisters + 2 * kConsumerRegisters, 3), "registers");

  FI_DEVICE MlaFineKernel(const BatchMlaParams& params, Shared& shared) : Base{params, shared} {}

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) this->init();
    __syncthreads();
    pdl_wait();
    if (warpgroup_index() == 0) {
      give_registers<kProducerRegisters>();
      MlaFineScheduler scheduler;
      scheduler.enter(params.view(), blockIdx.x);
      if (warp_index() == 0)
        produce(scheduler);
      else
        this->load_queries(scheduler, static_cast<int>(threadIdx.x) - 32);
    } else {
      take_registers<kConsumerRegisters>();
      consume(warpgroup_index() - 1);
    }
  }

 private:
  // The boxes of a KV tile: lane l has numbers l and l + 32.
  struct Boxes {
    int page[2], slot[2];
  };
  FI_DEVICE Boxes look_up(const MlaFineWork& s, int tile, int high) const {
    Boxes found;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = (i * 32 + static_cast<int>(threadIdx.x % 32)) * params.box, key = tile * kKeys + place;
      found.page[i] = found.slot[i] = 0;
      if (place >= kKeys || key >= high) continue;
      const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.page_size));
      found.page[i] = params.page_indices[s.request.first_page + index];
      found.slot[i] = key - index * static_cast<int>(params.page_size.value);
    }
    return found;
  }

  // By warp 0.
  FI_DEVICE void produce(MlaFineScheduler& scheduler) const {
    MlaFineWork s;
    auto at = PipelineState::producer();
    const int lane = threadIdx.x % 32;
    const uint64_t policy = params.view().header().cost < Base::kEvictFirstTiles ? kEvictFirst : kEvictNormal;
    for (int use = 0; publish_next(scheduler, shared, s, use, lane == 0); ++use) {
      const int high = this->high(s);
      Boxes next = look_up(s, s.begin, high);
      for (int tile = s.begin; tile * kKeys < high; ++tile) {
        const Boxes boxes = next;
        next = look_up(s, tile + 1, high);
#pragma unroll
        for (int n = 0; n < kParts; ++n) {
          if (lane == 0) {
            shared.pipeline.acquire(at);
            shared.pipeline.expect(at.stage, kPartBytes);
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int place = (i * 32 + lane) * params.box;
            if (place >= kKeys) continue;
#pragma unroll
            for (int k = 0; k < kPartBlocks; ++k) {
              const int b = n * kPartBlocks + k;
              tma_load_hinted(shared.kv[at.stage] + k * kBlockBytes + place * 128,
                              b < kLatentBlocks ? params.ckv_map : params.kpe_map, shared.pipeline.full[at.stage],
                              policy, b < kLatentBlocks ? b * 64 : 0, boxes.slot[i], boxes.page[i]);
            }
          }
          at.advance(kStages);
        }
        __syncwarp();
      }
    }
    pdl_launch_dependents();
  }

  // The state of a thread's rows over chunks, the outputs relative to row_max.
  struct State {
    float o[kHalf][8], row_max[4], row_sum[4];

    FI_DEVICE void clear() {
#pragma unroll
      for (int m = 0; m < kHalf; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) o[m][i] = 0.f;
#pragma unroll
      for (int c = 0; c < 4; ++c) row_max[c] = kMinusInf, row_sum[c] = 0.f;
    }
    FI_DEVICE void fold(const float (&next)[kHalf][8], const float (&next_max)[4], const float (&next_sum)[4]) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const auto fold = mla_fold<CudaMath>(row_max[c], row_sum[c], next_max[c], next_sum[c]);
        row_max[c] = fold.row_max, row_sum[c] = fold.row_sum;
#pragma unroll
        for (int m = 0; m < kHalf; ++m)
#pragma unroll
          for (int i = c / 2 * 4 + c % 2; i < c / 2 * 4 + 4; i += 2) o[m][i] = fold.value(o[m][i], next[m][i]);
      }
    }
    FI_DEVICE void fold(const State& next) { fold(next.o, next.row_max, next.row_sum); }
  };

  FI_DEVICE void consume(int group) const {
    const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
    const uint64_t q = wgmma_uniform(wgmma_operand(shared.q, 1024)), k = wgmma_uniform(wgmma_operand(shared.kv, 1024)),
                   v = wgmma_uniform(wgmma_operand(shared.kv, 1024, kBlockBytes)),
                   prob = wgmma_uniform(wgmma_operand(shared.p[group], 1024));
    unsigned taken = 0;  // parts
    for (int use = 0;; ++use) {
      const auto work_at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(work_at);
      const MlaFineWork& s = shared.work[work_at.stage];
      if (uniform(s.index) < 0) break;
      const int row0 = s.q_tile * kRows, begin = s.begin * kKeys, high = this->high(s);
      const int tiles = uniform(high > begin ? (high - begin + kKeys - 1) / kKeys : 0);
      Rows rows;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        rows.end[c] = min(params.end_key(s.request, params.row(row0 + this->row_of(lane, c)).token), high) - begin;
      State chunk, part, all;  // of the chunk that is computed; of those of kMlaChunkTiles; of all before
      chunk.clear(), part.clear(), all.clear();
      const bool has_chunks = uniform(s.has_chunks()), folds = !has_chunks && uniform(s.split) == 0;
      const int first = uniform(s.begin);
      const float scale = params.score_factor();
      shared.q_full.wait(use % 2);
      fence_async_shared();  // order: waiter: rows by cp.async, whose copiers have no fence behind them
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile, taken += kParts) {
        if (tile % kMlaFineTiles == 0) {
          chunk.clear();
#pragma unroll
          for (int c = 0; c < 4; ++c) rows.row_max[c] = kMinusInf, rows.row_sum[c] = 0.f;
        }
        float x[8];
        this->score(x, q, k, taken);
        this->release(taken + (group ? 0 : 2));  // the part without values of this warpgroup
        const float4 alpha = this->softmax(x, rows, scale, tile, group, warp, lane);
        const int left = high - begin - tile * kKeys;
        if (left < kKeys) this->clear(taken, group, left, thread);
        fence_async_shared();  // order: writer: wgmma reads probabilities and zeros behind the barrier
        warpgroup_sync(1 + group);
        this->rescale(chunk.o, alpha);
        this->add_values(chunk.o, v, prob, taken, group);
        this->release(taken + (group ? 1 : 0));
        this->release(taken + (group ? 2 : 1));
        const bool is_last = tile + 1 == tiles;
        if (tile % kMlaFineTiles + 1 < kMlaFineTiles && !is_last) continue;
        this->sum_rows(chunk.row_sum, rows, group, warp, lane);
        part.fold(chunk.o, rows.row_max, chunk.row_sum);
        if (!has_chunks && (first + tile) % kMlaChunkTiles + 1 < kMlaChunkTiles && !is_last) continue;
        const int stored = has_chunks ? kMlaFineTiles : kMlaChunkTiles;
        if (folds)
          all.fold(part);
        else
          this->store_partial(s.slot((first + tile) / stored * stored), part.o, part.row_max, part.row_sum, group, warp,
                              lane);
        part.clear();
      }
      if (s.is_whole()) {
        this->store_output(s, all.o, all.row_max, all.row_sum, row0, group, warp, lane);
      } else {
        if (folds) this->store_partial(s.base, all.o, all.row_max, all.row_sum, group, warp, lane);
        Merge{params, s, shared.merge, static_cast<int>(threadIdx.x) - kWarpgroup, 0, 0}.run();
      }
      __syncwarp();
      if (lane == 0) {
        shared.q_empty.arrive();  // order: lane: behind __syncwarp, and the wait for the last wgmma
        shared.work_pipeline.release(work_at.stage);
      }
    }
  }
};

template <class T, int kSharedBytes>
FI_DEVICE void batch_mla_fine(const BatchMlaParams& params) {
  run_in_shared<MlaFineKernel<T>, kSwizzlePeriod, kSharedBytes>(params);
}

}  // namespace fi
