// mqa_logits on Hopper: keys are the rows of wgmma, queries times heads its columns. A producer warp loads queries and
// keys by TMA and scales by cp.async; three warpgroups share each tile of keys, or split it, and sum over heads.
//
// A tile of 64 keys by 128 columns takes the tensor cores 256 cycles and the sum 128 instructions of each warp, so one
// warpgroup sums while others multiply. Three warpgroups of two queries of 64 heads read a tile of keys once: L2 gives
// 26 bytes a cycle to an SM, and 64 keys of 132 bytes take 325 cycles of it where products take 768. A fourth warpgroup
// would leave a thread 96 registers, which the 64 accumulators and 32 weights of a thread fill alone.
#pragma once
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"
#include "fi/indexer/mqa_logits_rows.cuh"

namespace fi {

// kRowGroups (1 or 3) of the warpgroups have rows of their own, kRows each; the others have keys of their own.
template <int kHeads, int kRows, int kRowGroups, bool kPaged>
struct MqaLogitsWgmmaKernel {
  static constexpr int kDim = 128, kWarpgroups = 3, kConsumers = kWarpgroups * kWarpgroup;
  static constexpr int kKeyGroups = kWarpgroups / kRowGroups, kKeys = 64 * kKeyGroups, kCtaRows = kRows * kRowGroups;
  static constexpr int kColumns = kHeads * kRows;
  static constexpr int kStages = kRowGroups == 1 ? 4 : 8, kQueries = kPaged ? 2 : 1;  // stages of keys, of queries
  static constexpr unsigned kQueryBytes = kColumns * kDim;
  using Rows = MqaLogitsRows<kHeads, kRows>;
  struct Shared {
    alignas(1024) char keys[kStages][kKeys * kDim];
    alignas(1024) char q[kQueries][kRowGroups][kQueryBytes];
    float scales[kStages][kKeys];
    Pipeline<kStages, Writer::kThreads, Reader::kBoth> pipeline;
    Pipeline<kQueries, Writer::kCopies, Reader::kProducts> query_pipeline;
  };

  // Key tiles [tile, end) of a row tile.
  struct Work {
    int row0, last_row, tile, end;
  };
  // The work of a CTA, of which each warp keeps its own account. Paged: the tiles of all row tiles in equal parts.
  struct Schedule {
    const MqaLogitsParams& p;
    int64_t left = 0;
    int item = 0, tile = 0;

    FI_DEVICE int tiles_of(int index) const {
      if (p.clean) return (p.columns + kKeys - 1) / kKeys;
      const int row = p.first_row(index, kCtaRows), last = p.last_row(row, kCtaRows);
      int end = 0;
      for (int r = row; r < last; ++r) end = max(end, p.end_of(r));
      return (end + kKeys - 1) / kKeys;
    }
    FI_DEVICE void enter() {
      if constexpr (!kPaged) {
        item = blockIdx.x, tile = blockIdx.y * p.chunk_tiles;
        left = min(tile + p.chunk_tiles, tiles_of(item)) - tile;
        return;
      }
      const int lane = threadIdx.x % 32, items = p.requests * ((p.next_n + kCtaRows - 1) / kCtaRows);
      int64_t all = 0;
      for (int i = lane; i < items; i += 32) all += tiles_of(i);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) all += __shfl_xor_sync(0xffffffffu, all, offset);
      int64_t begin = all * blockIdx.x / gridDim.x;
      left = all * (blockIdx.x + 1) / gridDim.x - begin;
      // Of 32 items at a time: in which the part begins.
      for (int first = 0; left > 0; first += 32) {
        const int own = first + lane < items ? tiles_of(first + lane) : 0;
        int up_to = own;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
          const int below = __shfl_up_sync(0xffffffffu, up_to, offset);
          if (lane >= offset) up_to += below;
        }
        const unsigned behind = __ballot_sync(0xffffffffu, up_to > begin);
        if (behind) {
          const int found = __ffs(static_cast<int>(behind)) - 1;
          item = first + found;
          tile = static_cast<int>(begin) - __shfl_sync(0xffffffffu, up_to - own, found);
          return;
        }
        begin -= __shfl_sync(0xffffffffu, up_to, 31);
      }
    }
    FI_DEVICE bool next(Work& work) {
      while (left > 0) {
        const int all = tiles_of(item), count = static_cast<int>(left < all - tile ? left : all - tile);
        const int row = p.first_row(item, kCtaRows);
        work = {uniform(row), uniform(p.last_row(row, kCtaRows)), uniform(tile), uniform(tile + count)};
        left -= count, ++item, tile = 0;
        if (count > 0) return true;
      }
      return false;
    }
  };

  const MqaLogitsParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) {
      shared.pipeline.init(1 + 32, kConsumers / 32);
      shared.query_pipeline.init(1, kConsumers / 32);
      fence_barrier_init();
      prefetch_tensor_map(p.q_map);
      prefetch_tensor_map(p.key_map);
    }
    __syncthreads();
    pdl_wait();
    Schedule schedule{p};
    schedule.enter();
    if (warp_index() == kConsumers / 32)
      produce(schedule);
    else
      consume(schedule);
    pdl_launch_dependents();
  }

 private:
  // Whether a row of the CTA sees a key of a tile; the tiles of a chunk that none sees are not loaded.
  struct Window {
    int begin = 0x7fffffff, end = 0;
    FI_DEVICE Window(const MqaLogitsParams& p, const Work& work) {
#pragma unroll 1
      for (int row = work.row0; row < work.last_row; ++row) {
        const int first = p.begin_of(row), last = p.end_of(row);
        if (first < last) begin = min(begin, first), end = max(end, last);
      }
    }
    FI_DEVICE bool meets(int tile) const { return tile * kKeys < end && (tile + 1) * kKeys > begin; }
  };

  FI_DEVICE void produce(Schedule& schedule) const {
    const int lane = threadIdx.x % 32;
    auto at = PipelineState::producer(), query_at = PipelineState::producer();
    Work work;
    while (schedule.next(work)) {
      const Window window(p, work);
      if (lane == 0) {
        shared.query_pipeline.acquire(query_at);
        Barrier& full = shared.query_pipeline.expect(query_at.stage, kRowGroups * kQueryBytes);
#pragma unroll
        for (int g = 0; g < kRowGroups; ++g)
          tma_load(shared.q[query_at.stage][g], p.q_map, full, 0, 0, work.row0 + g * kRows);
      }
      query_at.advance(kQueries);
      const int request = kPaged ? work.row0 / p.next_n : 0;
      int page = page_of(request, work.tile, window.end, lane);
      for (int tile = work.tile; tile < work.end; ++tile) {
        if (!window.meets(tile)) continue;
        const int now = page;
        if (kPaged) page = page_of(request, tile + 1, window.end, lane);
        load(at.stage, at, tile, window.end, now, lane);
        at.advance(kStages);
      }
    }
  }

  // The page of the lane's box of a tile; -1: no row sees a key of it.
  FI_DEVICE int page_of(int request, int tile, int end, int lane) const {
    if constexpr (!kPaged) return 0;
    const int key = tile * kKeys + lane * p.box_keys;
    return lane * p.box_keys < kKeys && key < end ? p.block_table[request * p.table_stride + key / p.page_size] : -1;
  }

  FI_DEVICE void load(int stage, const PipelineState& at, int tile, int end, int page, int lane) const {
    shared.pipeline.acquire(at);
    const int first = tile * kKeys;
    if constexpr (kPaged) {
      const int boxes = __popc(__ballot_sync(0xffffffffu, page >= 0));
      if (lane == 0) shared.pipeline.expect(stage, boxes * p.box_keys * kDim);
      __syncwarp();
      if (page >= 0)
        tma_load(shared.keys[stage] + lane * p.box_keys * kDim, p.key_map, shared.pipeline.full[stage], 0,
                 (first + lane * p.box_keys) % p.page_size, page);
    } else if (lane == 0) {
      Barrier& full = shared.pipeline.expect(stage, kKeys * kDim);
      tma_load(shared.keys[stage], p.key_map, full, 0, first);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const int k = i * 32 + lane, key = first + k;
      const float* from = p.scales + key;
      if constexpr (kPaged) {
        const int own = __shfl_sync(0xffffffffu, page, k / p.box_keys);
        const char* base = static_cast<const char*>(p.keys) + own * p.page_stride;
        from = reinterpret_cast<const float*>(base + static_cast<int64_t>(p.page_size) * kDim) + key % p.page_size;
      }
      cp_async_small<4>(&shared.scales[stage][k], key < end ? from : p.weights, key < end);
    }
    shared.pipeline.commit_copies(stage);
  }

  FI_DEVICE void consume(Schedule& schedule) const {
    const int group = warpgroup_index(), row_group = group % kRowGroups, key_group = group / kRowGroups;
    const int lane = threadIdx.x % 32, warp = warp_index() % 4;
    const uint64_t keys = wgmma_uniform(wgmma_operand(shared.keys, 1024)),
                   queries = wgmma_uniform(wgmma_operand(shared.q, 1024));
    unsigned taken = 0, use = 0;
    Work work;
    for (; schedule.next(work); ++use) {
      const Window window(p, work);
      const Rows rows(p, work.row0 + row_group * kRows, work.last_row, lane);
      const auto query_at = PipelineState::consumer_at<kQueries>(use);
      const uint64_t q = wgmma_further(queries, (query_at.stage * kRowGroups + row_group) * kQueryBytes);
      shared.query_pipeline.wait(query_at);
#pragma unroll 1
      for (int tile = work.tile; tile < work.end; ++tile) {
        const int local = key_group * 64 + warp * 16, key = tile * kKeys + local;
        if (!window.meets(tile)) {
          rows.clear(p, key, lane);
          continue;
        }
        const auto at = PipelineState::consumer_at<kStages>(taken++);
        float d[kColumns / 2];
        shared.pipeline.wait(at);
        wgmma_shared<__nv_fp8_e4m3, kDim>(d, wgmma_further(keys, at.stage * kKeys * kDim + key_group * 64 * kDim), 0, q,
                                          0);
        const float low = shared.scales[at.stage][local + lane / 4],
                    high = shared.scales[at.stage][local + lane / 4 + 8];
        wgmma_finish(d);
        shared.pipeline.release_warp(at.stage, lane);
        rows.store(p, d, key, lane, [&](int own) { return own - key >= 8 ? high : low; });
      }
      shared.query_pipeline.release_warp(query_at.stage, lane);
    }
  }
};

template <int kHeads, int kRows, int kRowGroups, bool kPaged, int kBytes>
FI_DEVICE void mqa_logits_wgmma(const MqaLogitsParams& p) {
  run_in_shared<MqaLogitsWgmmaKernel<kHeads, kRows, kRowGroups, kPaged>, 1024, kBytes>(p);
}

}  // namespace fi
