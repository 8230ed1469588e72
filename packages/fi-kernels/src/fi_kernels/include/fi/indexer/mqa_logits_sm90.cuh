// mqa_logits on Hopper: keys are the rows of wgmma, queries times heads its columns. A producer warp loads queries and
// keys by TMA; two warpgroups share each tile of keys, or split it, and sum over heads.
//
// A tile of 64 keys by 128 columns takes the tensor cores 256 cycles and the sum about 170 instructions of each warp,
// of which an SM issues four a cycle. A warpgroup has two tiles of accumulators: it sums one while the tensor cores
// fill the other. Two warpgroups of 128 columns read a tile of keys once: L2 gives 26 bytes a cycle to an SM, and 64
// keys of 132 bytes take 325 cycles of it where products take 512.
#pragma once
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"
#include "fi/indexer/mqa_logits_rows.cuh"

namespace fi {

// kRowGroups (1 or 2) of the warpgroups have rows of their own, kRows each; the others have keys of their own.
template <int kHeads, int kRows, int kRowGroups, bool kPaged>
struct MqaLogitsWgmmaKernel {
  static constexpr int kDim = 128, kWarpgroups = 2, kConsumers = kWarpgroups * kWarpgroup;
  static constexpr int kKeyGroups = kWarpgroups / kRowGroups, kKeys = 64 * kKeyGroups, kCtaRows = kRows * kRowGroups;
  static constexpr int kColumns = kHeads * kRows;
  static constexpr int kStages = kRowGroups == 1 ? 6 : 8, kQueries = 2;  // stages of keys, of queries
  static constexpr unsigned kQueryBytes = kColumns * kDim;
  static constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
  static_assert(registers_fit(kProducerRegisters + kWarpgroups * kConsumerRegisters, kWarpgroups + 1), "registers");
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
  // Those of them, [begin, end), that hold a key which a row sees: the others are not loaded.
  struct Tiles {
    int begin, end, keys;  // keys: behind the last that a row sees
    FI_DEVICE Tiles(const MqaLogitsParams& p, const Work& work) {
      const MqaLogitsWindow<kCtaRows, kPaged> window(p, work.row0, work.last_row);
      begin = uniform(max(work.tile, window.begin / kKeys));
      end = uniform(min(work.end, (window.end + kKeys - 1) / kKeys));
      keys = window.end;
    }
  };
  // The work of a CTA, of which each warp keeps its own account: the tiles of all row tiles in equal parts.
  struct Schedule {
    const MqaLogitsParams& p;
    int64_t left = 0;
    int item = 0, done = 0;  // done: tiles of the item that are others' work, or were its own

    // The key tiles of a row tile.
    FI_DEVICE Work of(int index) const {
      const int row = kPaged ? p.first_row(index, kCtaRows) : index * kCtaRows;
      const int last = kPaged ? p.last_row(row, kCtaRows) : min(row + kCtaRows, p.rows);
      if (p.clean) return {row, last, 0, (p.columns + kKeys - 1) / kKeys};
      const MqaLogitsWindow<kCtaRows, kPaged> window(p, row, last);
      const int end = (window.end + kKeys - 1) / kKeys;
      return {row, last, min(window.begin / kKeys, end), end};
    }
    FI_DEVICE int tiles_of(int index) const {
      const Work work = of(index);
      return work.end - work.tile;
    }
    FI_DEVICE void enter() {
      const int lane = threadIdx.x % 32, most = kPaged ? p.next_n : p.rows;
      const int items = (kPaged ? p.requests : 1) * ((most + kCtaRows - 1) / kCtaRows);
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
          done = static_cast<int>(begin) - __shfl_sync(0xffffffffu, up_to - own, found);
          return;
        }
        begin -= __shfl_sync(0xffffffffu, up_to, 31);
      }
    }
    FI_DEVICE bool next(Work& work) {
      while (left > 0) {
        const Work all = of(item++);
        const int tile = all.tile + done, count = static_cast<int>(min(left, int64_t{all.end - tile}));
        work = {uniform(all.row0), uniform(all.last_row), uniform(tile), uniform(tile + count)};
        left -= count, done = 0;
        if (count > 0) return true;
      }
      return false;
    }
  };

  const MqaLogitsParams& p;
  Shared& shared;

  // sink: seen(row, logit) gets each logit, by the row's place among those of the CTA; end(row) comes behind those of a
  // row tile, start() before all and finish() behind all.
  template <class Sink>
  FI_DEVICE void run(Sink& sink) const {
    if (threadIdx.x == 0) {
      shared.pipeline.init(kPaged ? 1 : 1 + 32, kConsumers / 32);
      shared.query_pipeline.init(1, kConsumers / 32);
      fence_barrier_init();
      prefetch_tensor_map(p.q_map);
      prefetch_tensor_map(p.key_map);
    }
    __syncthreads();
    pdl_wait();
    Schedule schedule{p};
    if (warpgroup_index() == kWarpgroups) {
      give_registers<kProducerRegisters>();
      if (warp_index() != kConsumers / 32) return;
      schedule.enter();
      produce(schedule);
    } else {
      take_registers<kConsumerRegisters>();
      schedule.enter();
      consume(schedule, sink);
    }
  }

 private:
  FI_DEVICE void produce(Schedule& schedule) const {
    const int lane = threadIdx.x % 32;
    auto at = PipelineState::producer(), query_at = PipelineState::producer();
    Work work;
    while (schedule.next(work)) {
      const Tiles tiles(p, work);
      if (lane == 0) {
        shared.query_pipeline.acquire(query_at);
        Barrier& full = shared.query_pipeline.expect(query_at.stage, kRowGroups * kQueryBytes);
#pragma unroll
        for (int g = 0; g < kRowGroups; ++g)
          tma_load(shared.q[query_at.stage][g], p.q_map, full, 0, 0, work.row0 + g * kRows);
      }
      query_at.advance(kQueries);
      if constexpr (kPaged)
        load_pages(work.row0 / p.next_n, tiles, at, lane);
      else
        load_keys(tiles, at, lane);
    }
  }

  // A lane loads one of the equal parts of a tile, which lie in pages. It asks for the page of the next tile before it
  // loads this one.
  FI_DEVICE void load_pages(int request, const Tiles& tiles, PipelineState& at, int lane) const {
    const int32_t* table = p.block_table + request * p.table_stride;
    const int part = lane * p.box_keys;
    int key = part < kKeys ? tiles.begin * kKeys + part : tiles.keys, index = key / p.page_size;
    int slot = key - index * p.page_size, next_slot = slot;
    const int pages = kKeys / p.page_size, slots = kKeys - pages * p.page_size;
    int page = 0;
    const auto ask = [&](int tile) { return tile < tiles.end && key < tiles.keys ? table[index] : -1; };
    int next = ask(tiles.begin);
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      page = next, slot = next_slot;
      if (part < kKeys) key += kKeys;
      index += pages, next_slot += slots;
      if (next_slot >= p.page_size) next_slot -= p.page_size, ++index;
      next = ask(tile + 1);
      shared.pipeline.acquire(at);
      const int parts = __popc(__ballot_sync(0xffffffffu, page >= 0));
      if (lane == 0) shared.pipeline.expect(at.stage, parts * p.box_keys * (kDim + 4));
      __syncwarp();
      if (page >= 0) {
        Barrier& full = shared.pipeline.full[at.stage];
        tma_load(shared.keys[at.stage] + part * kDim, p.key_map, full, 0, slot, page);
        const char* scales = static_cast<const char*>(p.keys) + page * p.page_stride + p.page_size * int64_t{kDim};
        bulk_load(shared.scales[at.stage] + part, scales + slot * 4, p.box_keys * 4, full);
      }
      at.advance(kStages);
    }
  }

  FI_DEVICE void load_keys(const Tiles& tiles, PipelineState& at, int lane) const {
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      shared.pipeline.acquire(at);
      if (lane == 0)
        tma_load(shared.keys[at.stage], p.key_map, shared.pipeline.expect(at.stage, kKeys * kDim), 0, tile * kKeys);
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const int k = i * 32 + lane, key = tile * kKeys + k;
        cp_async_small<4>(&shared.scales[at.stage][k], key < tiles.keys ? p.scales + key : p.weights, key < tiles.keys);
      }
      shared.pipeline.commit_copies(at.stage);
      at.advance(kStages);
    }
  }

  template <class Sink>
  FI_DEVICE void consume(Schedule& schedule, Sink& sink) const {
    const int group = warpgroup_index(), row_group = group % kRowGroups, key_group = group / kRowGroups;
    const int lane = threadIdx.x % 32, local = key_group * 64 + warp_index() % 4 * 16;
    const uint64_t keys = wgmma_uniform(wgmma_operand(shared.keys[0] + key_group * 64 * kDim, 1024)),
                   queries = wgmma_uniform(wgmma_operand(shared.q[0][row_group], 1024));
    PipelineState ahead, at;
    unsigned use = 0;
    sink.start();
    Work work;
    for (; schedule.next(work); ++use) {
      const Tiles tiles(p, work);
      const Rows rows(p, work.row0 + row_group * kRows, work.last_row, lane);
      const auto query_at = PipelineState::consumer_at<kQueries>(use);
      const uint64_t q = wgmma_further(queries, query_at.stage * kRowGroups * kQueryBytes);
      if (p.clean)
        for (int tile = work.tile; tile < work.end; ++tile)
          if (tile < tiles.begin || tile >= tiles.end) rows.clear(tile * kKeys + local, lane);
      const auto multiply = [&](float (&d)[kColumns / 2]) {
        shared.pipeline.wait(ahead);
        wgmma_shared<__nv_fp8_e4m3, kDim>(d, wgmma_further(keys, ahead.stage * kKeys * kDim), 0, q, 0);
        ahead.advance(kStages);
      };
      int tile = tiles.begin;
      const auto sum = [&](float (&d)[kColumns / 2]) {
        const float low = shared.scales[at.stage][local + lane / 4],
                    high = shared.scales[at.stage][local + lane / 4 + 8];
        wgmma_keep(d);
        shared.pipeline.release_warp(at.stage, lane);
        at.advance(kStages);
        const int key = tile++ * kKeys + local;
        rows.store(
            p, d, key, lane, [&](int own) { return own - key >= 8 ? high : low; },
            [&](int row, float logit) { sink.seen(row_group * kRows + row, logit); });
      };
      float even[kColumns / 2], odd[kColumns / 2];
      shared.query_pipeline.wait(query_at);
      if (tile < tiles.end) {
        multiply(even);
#pragma unroll 1
        while (tile + 2 < tiles.end) {
          multiply(odd);
          wgmma_wait<1>();
          sum(even);
          multiply(even);
          wgmma_wait<1>();
          sum(odd);
        }
        if (tile + 1 < tiles.end) {
          multiply(odd);
          wgmma_wait<1>();
          sum(even);
          wgmma_wait<0>();
          sum(odd);
        } else {
          wgmma_wait<0>();
          sum(even);
        }
      }
      shared.query_pipeline.release_warp(query_at.stage, lane);
      sink.end(work.row0);
    }
    sink.finish();
  }
};

struct MqaLogitsNoSink {
  FI_DEVICE void start() const {}
  FI_DEVICE void seen(int, float) const {}
  FI_DEVICE void end(int) const {}
  FI_DEVICE void finish() const { pdl_launch_dependents(); }
};

template <int kHeads, int kRows, int kRowGroups, bool kPaged>
struct MqaLogitsAlone : MqaLogitsWgmmaKernel<kHeads, kRows, kRowGroups, kPaged> {
  FI_DEVICE void run() const {
    MqaLogitsNoSink sink;
    MqaLogitsWgmmaKernel<kHeads, kRows, kRowGroups, kPaged>::run(sink);
  }
};

template <int kHeads, int kRows, int kRowGroups, bool kPaged, int kBytes>
FI_DEVICE void mqa_logits_wgmma(const MqaLogitsParams& p) {
  run_in_shared<MqaLogitsAlone<kHeads, kRows, kRowGroups, kPaged>, 1024, kBytes>(p);
}

}  // namespace fi
