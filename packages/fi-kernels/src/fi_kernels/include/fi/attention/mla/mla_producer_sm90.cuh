// The producer warpgroup of wide q tiles on Hopper: loads queries and KV tiles, and publishes work tiles.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/attention/mla/mla_rows_sm90.cuh"
#include "fi/attention/mla/mla_work_tiles_sm90.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

// kTma: KV tiles lie in whole pages and are loaded by TMA; otherwise by cp.async, from pages of any size. An e4m3 cache
// is loaded to registers and stored as 16-bit values times their scales, by the two CTAs of a cluster for both of them.
// NOTE: the two CTAs of a cluster need the same tiles. Each loading half of a 16-bit tile for both by multicast is
// slower, since a stage is then free only when both CTAs have read it (docs/notes/mla-wide.md).
template <class T, class KV, bool kTma>
struct MlaProducer {
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static_assert(!(kFp8 && kTma));
  static constexpr bool kSharesScheduler = kFp8 || (kMlaFixedSplits && !kTma);
  static constexpr int kRows = 64, kKeys = kMlaKvTile, kStages = 2;
  static constexpr int kBlocks = kMlaWidth / 64, kLatentBlocks = kMlaLatent / 64;  // of 64 columns
  using Rows = MlaRows<T>;
  // A stage is filled and freed in parts: the half of the latent columns that consumer warpgroup 0 multiplies with,
  // that of warpgroup 1, and the rotary block.
  static constexpr int kParts = 3, kPartBlocks = Rows::kPartBlocks;
  static constexpr int kBlock = Rows::kBlock;  // elements
  // A cluster brings a tile to L2 while the producers wait for a stage for the one before: one ahead is faster than
  // none or two. A CTA alone reads as fast as memory gives, and is slower so (docs/notes/mla-wide.md).
  static constexpr int kAhead = 1;
  // Batches of fewer KV tiles (100 MB) are the first that L2 evicts: as in batch decode.
  static constexpr int kEvictFirstTiles = (100 << 20) / (kKeys * kMlaWidth * 2);

  struct Shared {
    alignas(1024) T q[kBlocks][kBlock];
    alignas(1024) T kv[kStages][kBlocks][kBlock];
    alignas(1024) T p[kBlock];  // probabilities of one KV tile: who reads one writes the next
    float row_max[kRows], alpha[kRows], row_sum[2][kRows];
    MlaWork work[2];                               // index -1: no more
    alignas(8) unsigned short exists[kStages][4];  // bit r: key 16 w + r of the stage exists; not by TMA
    Barrier full[kStages][kParts], empty[kStages][kParts], q_full, q_empty, p_full;
    Pipeline<2, Writer::kThreads, Reader::kLoads> work_pipeline;
    MlaScheduler scheduler;  // where registers are few
  };

  const BatchMlaParams& params;
  Shared& shared;

  // By one thread.
  FI_DEVICE void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int part = 0; part < kParts; ++part)
        shared.full[stage][part].init(kTma ? 1 : exchanges() ? 4 : part == 2 ? kWarpgroup + 4 : kFp8 ? 4 : kWarpgroup);
      for (Barrier& empty : shared.empty[stage]) empty.init(exchanges() ? 8 : 4);
    }
    shared.q_full.init(kTma ? 96 : kWarpgroup);
    shared.q_empty.init(8);
    shared.p_full.init(kWarpgroup);
    shared.work_pipeline.init(1, kSharesScheduler ? 12 : 8);
    fence_barrier_init();
    if (kTma) {
      prefetch_tensor_map(params.ckv_map);
      prefetch_tensor_map(params.kpe_map);
    }
  }

  // Whether both CTAs of a cluster dequantize half of each KV tile and store it in the shared memory of both.
  FI_DEVICE bool exchanges() const { return kFp8 && params.cluster == 2; }
  // All threads: who exchanges meets the other CTA, before it stores there and before it ends.
  FI_DEVICE void meet() const {
    if (!exchanges()) return;
    __syncwarp();
    cluster_sync();
  }

  // The key after the last one that the CTA loads. CTAs that exchange take the same KV tiles.
  FI_DEVICE int high(const MlaWorkTile& s, int first) const {
    return exchanges() ? params.high(s, first_row(s, 0), params.tile_rows) : params.high(s, first_row(s, first), kRows);
  }
  // By a consumer warp: four of them, of each CTA that stores there, use a part last. Its lanes have waited together
  // for the wgmma that reads it, or are behind __syncwarp.
  FI_DEVICE void release(int stage, int part) const {
    const unsigned lane = threadIdx.x % 32;
    if (exchanges()) {
      if (lane < 2) shared.empty[stage][part].arrive_at(lane);  // order: cluster: counts only; data completes bytes
    } else if (lane == 0) {
      shared.empty[stage][part].arrive();  // order: lane: as above
    }
  }
  // The order in which warpgroup j % 2 reads the parts of KV tile j.
  FI_DEVICE static int part_of(int j, int i) { return i == 2 ? 2 : (i ^ j) & 1; }

  // By the producer warpgroup. first: the first row of this CTA in a q tile.
  FI_DEVICE void run(int range, int first) const {
    if constexpr (kFp8) return exchanges() ? produce_halves(range, first) : produce_dequantized(range, first);
    MlaScheduler scheduler;
    if constexpr (kSharesScheduler && !kFp8) {
      if (threadIdx.x == 0) shared.scheduler.enter(params.view(), range);
      return produce(scheduler, first);
    }
    scheduler.enter(params.view(), range);
    if constexpr (!kTma)
      produce(scheduler, first);
    else if (warp_index() == 0)
      produce_tma(scheduler, first);
    else
      load_all_queries(scheduler, first, 32, 96);
  }

  // The first packed row of this CTA in a work tile.
  FI_DEVICE int first_row(const MlaWorkTile& s, int first) const { return s.q_tile * params.tile_rows + first; }

  // Loads the queries of a work tile: rows beyond the request become zeros. thread: of `threads`.
  FI_DEVICE void load_queries(const MlaWork& s, int row0, int thread, int threads) const {
    if constexpr (kMlaFixedSplits)
      if (!s.begins()) return;  // those of the chunk before
    load_mla_queries<T, kRows>(params, s, row0, reinterpret_cast<char*>(shared.q), thread, threads);
  }
  FI_DEVICE void load_all_queries(MlaScheduler& scheduler, int first, int begin, int threads) const {
    MlaWork s;
    for (int use = 0; scheduler.next(s); ++use) {
      shared.q_empty.wait(use % 2 ^ 1);
      load_queries(s, first_row(s, first), static_cast<int>(threadIdx.x) - begin, threads);
      shared.q_full.arrive_copies();  // order: thread: every thread arrives for its own copies
    }
  }

  FI_DEVICE void produce_tma(MlaScheduler& scheduler, int first) const {
    MlaWork s;
    auto at = PipelineState::producer();
    const int lane = threadIdx.x % 32;
    // Both CTAs of a cluster read the same tiles.
    const bool once = params.cluster == 1 && params.view().header().cost < kEvictFirstTiles;
    const uint64_t policy = once ? kEvictFirst : kEvictNormal;
    for (int use = 0; publish_next(scheduler, shared, s, use, threadIdx.x == 0); ++use) {
      const int high = this->high(s, first);
      MlaTilePages pages{params, s, high};
      for (int tile = s.begin, i = 0; tile * kKeys < high; ++tile, ++i) {
        pages.advance(i, tile);
        const int here = pages.page_of(i), token = pages.slot_of(i);
        const int later = pages.later_page_of(i, kAhead), later_token = pages.later_slot_of(i, kAhead);
        // Not unrolled, here and in prefetch_tile: the first tile waits for these instructions.
        if (lane == 0) {
          if (params.cluster > 1 && i + kAhead >= kStages && (tile + kAhead) * kKeys < high)
            prefetch_tile(policy, first, later, later_token);
#pragma unroll 1
          for (int n = 0; n < kParts; ++n) {
            const int part = part_of(i, n), blocks = n < 2 ? kPartBlocks : 1;
            shared.empty[at.stage][part].wait(at.phase);
            Barrier& full = shared.full[at.stage][part];
            full.arrive_expect(blocks * kBlock * 2);
#pragma unroll 1
            for (int k = 0; k < blocks; ++k) {
              const int b = part * kPartBlocks + k;
              const TensorMap& map = n < 2 ? params.ckv_map : params.kpe_map;
              const int column = n < 2 ? b * 64 : 0;
              tma_load_hinted(shared.kv[at.stage][b], map, full, policy, column, token, here);
            }
          }
        }
        __syncwarp();
        at.advance(kStages);
      }
    }
    pdl_launch_dependents();
  }

  // CTAs of a cluster read the same tile: each brings some of its blocks to L2.
  FI_DEVICE void prefetch_tile(uint64_t policy, int first, int page, int token) const {
#pragma unroll 1
    for (int b = first / kRows; b < kBlocks; b += params.cluster)
      tma_prefetch_hinted(b < kLatentBlocks ? params.ckv_map : params.kpe_map, policy, b < kLatentBlocks ? b * 64 : 0,
                          token, page);
  }

  // The scheduler of chunks would take too many registers of each thread.
  FI_DEVICE bool next(MlaScheduler& scheduler, MlaWork& s, int use) const {
    if constexpr (!kSharesScheduler) return publish_next(scheduler, shared, s, use, threadIdx.x == 0);
    const MlaWork* found = next_work_tile(use);
    if (!found) return false;
    s = *found;
    shared.work_pipeline.release_warp(use % 2);
    return true;
  }

  // By cp.async: warp w loads keys 16 w .. 16 w + 15 of a tile, four at a time with eight lanes for each.
  FI_DEVICE void produce(MlaScheduler& scheduler, int first) const {
    MlaWork s;
    auto at = PipelineState::producer();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 8, chunk = lane % 8;
    for (int use = 0; next(scheduler, s, use); ++use) {
      const int high = this->high(s, first);
      // NOTE: entries of the next tile are compared with the pages of the cache when their tile begins: a comparison
      // waits for the load.
      const auto look_up = [&](int tile, int (&entries)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = tile * kKeys + row + i * 4;
          entries[i] = -1;
          if (key < high)
            entries[i] = params.page_indices[s.request.first_page + static_cast<int>(divide(key, params.page_size))];
        }
      };
      int pages[4], next[4];
      look_up(s.begin, next);
      shared.q_empty.wait(use % 2 ^ 1);
      load_queries(s, first_row(s, first), threadIdx.x, kWarpgroup);
      shared.q_full.arrive_copies();  // order: thread: every thread arrives for its own copies
      for (int tile = s.begin; tile * kKeys < high; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pages[i] = params.checked_page(next[i]);
        look_up(tile + 1, next);
        const T *ckv[4], *kpe[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = tile * kKeys + row + i * 4, page = pages[i] < 0 ? 0 : pages[i];
          const int slot = key - static_cast<int>(divide(key, params.page_size) * params.page_size.value);
          ckv[i] = static_cast<const T*>(params.ckv) + params.ckv_offset(page, slot) + chunk * 8;
          kpe[i] = static_cast<const T*>(params.kpe) + params.kpe_offset(page, slot) + chunk * 8;
        }
        char* to = reinterpret_cast<char*>(shared.kv[at.stage]) + swizzled_offset(row, chunk);
        char* to_odd = reinterpret_cast<char*>(shared.kv[at.stage]) + swizzled_offset(row + 4, chunk) - 4 * 128;
#pragma unroll
        for (int n = 0; n < kParts; ++n) {
          const int part = part_of(tile - s.begin, n), blocks = n < 2 ? kPartBlocks : 1;
          shared.empty[at.stage][part].wait(at.phase);
#pragma unroll
          for (int k = 0; k < blocks; ++k) {
            const int b = part * kPartBlocks + k;
#pragma unroll
            for (int i = 0; i < 4; ++i)
              cp_async_16((i % 2 ? to_odd : to) + b * (kBlock * 2) + i * 4 * 128, n < 2 ? ckv[i] + b * 64 : kpe[i],
                          pages[i] >= 0);
          }
          if (n == 2) {
            unsigned exist = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const unsigned votes = __ballot_sync(0xffffffffu, pages[i] >= 0);  // of eight lanes each
              exist |= ((votes & 1) | (votes >> 7 & 2) | (votes >> 14 & 4) | (votes >> 21 & 8)) << (4 * i);
            }
            if (lane == 0) {
              shared.exists[at.stage][threadIdx.x / 32] = static_cast<unsigned short>(exist);
              shared.full[at.stage][part].arrive();  // order: lane: the word of `exists` is of lane 0
            }
          }
          shared.full[at.stage][part].arrive_copies();  // order: thread: consumers fence behind their wait
        }
        at.advance(kStages);
      }
    }
    pdl_launch_dependents();
  }

  // By the producer warpgroup: the next work tile, which its thread 0 gives to all; nullptr: there is none.
  FI_DEVICE const MlaWork* next_work_tile(int use) const {
    const auto at = PipelineState::producer_at<2>(use);
    if (threadIdx.x == 0) {
      shared.work_pipeline.acquire(at);
      MlaWork& next = shared.work[at.stage];
      if (!shared.scheduler.next(next)) next.index = -1;
      shared.work_pipeline.commit(at.stage);
    }
    __syncwarp();
    shared.work_pipeline.wait(PipelineState::consumer_at<2>(use));
    const MlaWork* s = &shared.work[at.stage];
    return uniform(s->index) < 0 ? nullptr : s;
  }

  // NOTE: without fence_async_shared, which is left to the consumers: ptxas puts MEMBAR in front of it, which waits for
  // the loads in flight.
  // Warp w has keys 16 w .. 16 w + 15 of a tile, a lane two of them, `row` and row + 8.
  FI_DEVICE void produce_dequantized(int range, int first) const {
    const Rows rows{params};
    auto at = PipelineState::producer();
    const int lane = threadIdx.x % 32, quad = lane % 4, row = threadIdx.x / 32 * 16 + lane / 4;
    const int chunk = swizzled_offset(row, quad * 2), next_chunk = swizzled_offset(row, quad * 2 + 1);
    if (threadIdx.x == 0) shared.scheduler.enter(params.view(), range);
    for (int use = 0;; ++use) {
      const MlaWork* found = next_work_tile(use);
      if (!found) break;
      const MlaWork& s = *found;
      const int high = this->high(s, first), begin = s.begin;
      int entries[2];
      typename Rows::Source now[2];
      const auto look_up_both = [&](int tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) entries[i] = rows.look_up(s, tile * kKeys + row + 8 * i, high);
      };
      const auto find_both = [&](int tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) now[i] = rows.source(tile * kKeys + row + 8 * i, entries[i]);
        look_up_both(tile + 1);
      };
      look_up_both(begin);
      find_both(begin);
      typename Rows::RawPart raw[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) rows.load_part(raw[i], now[i], 0, quad);
      shared.q_empty.wait(use % 2 ^ 1);
      load_queries(s, first_row(s, first), threadIdx.x, kWarpgroup);
      shared.q_full.arrive_copies();  // order: thread: every thread arrives for its own copies
      for (int tile = begin; tile * kKeys < high; ++tile) {
        char* stage = reinterpret_cast<char*>(shared.kv[at.stage]);
        // The rotary block was read first of the tile before in this stage.
        shared.empty[at.stage][2].wait(at.phase);
        char* ropes_to = stage + kLatentBlocks * (kBlock * 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* from = rows.kpe_row(now[i], quad * 16);
          const bool exists = now[i].page >= 0;
          cp_async_16(ropes_to + chunk + i * 8 * 128, from, exists);
          if (params.wide_rope) cp_async_16(ropes_to + next_chunk + i * 8 * 128, from + 16, exists);
        }
        if (params.wide_rope)
          shared.full[at.stage][2].arrive_copies();  // order: thread: consumers fence behind their wait
        else
          cp_async_commit();
        // Lanes 0 to 15 ask whether their key exists.
        const int page = __shfl_sync(0xffffffffu, now[0].page, lane * 4 % 32),
                  other = __shfl_sync(0xffffffffu, now[1].page, lane * 4 % 32);
        const unsigned exist = __ballot_sync(0xffffffffu, (lane < 8 ? page : other) >= 0);
        if (lane == 0) {
          shared.exists[at.stage][threadIdx.x / 32] = static_cast<unsigned short>(exist);
          shared.full[at.stage][2].arrive();  // order: lane: the word of `exists` is of lane 0
        }
        int part = part_of(tile - begin, 0);
#pragma unroll
        for (int n = 0; n < 2; ++n, part ^= 1) {
          char* to = stage + part * (kPartBlocks * kBlock * 2);
          // The parts of a tile come in the reverse order of those before.
          const int next_part = n ? part : part ^ 1;
          if (n) find_both(tile + 1);
          shared.empty[at.stage][part].wait(at.phase);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            rows.store_part({to + chunk + i * 8 * 128, to + next_chunk + i * 8 * 128}, raw[i]);
            rows.load_part(raw[i], now[i], next_part, quad);
            __syncwarp();  // else ptxas puts the loads behind the stores of the other key
          }
          // order: waiter: behind __syncwarp; consumers fence, as MEMBAR before a fence here waits for the next loads
          if (lane == 0) shared.full[at.stage][part].arrive();
          if (n == 0 && !params.wide_rope) {  // this thread's bytes have arrived where their values will be
            cp_async_wait<0>();
            const MlaFactor<MlaScale::kAny> factor(params.rope_factor);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              char* to = ropes_to + chunk + i * 8 * 128;
              rows.store_dequantized({to, ropes_to + next_chunk + i * 8 * 128}, 0, *reinterpret_cast<const uint4*>(to),
                                     factor);
            }
            shared.full[at.stage][2].arrive();  // order: waiter: every thread, for its own stores; consumers fence
          }
        }
        at.advance(kStages);
      }
      shared.work_pipeline.release_warp(use % 2, lane);
    }
    pdl_launch_dependents();
  }

  // With the other CTA of a cluster: warp w of CTA c has keys 32 c + 8 w .. 32 c + 8 w + 7 of a tile, a lane one of
  // them. It stores its columns of a tile, which the warp copies to the other CTA, then loads those of the next one all
  // at once. st.async instead of copies takes as long as no exchange at all (docs/notes/mla-e4m3.md). NOTE: ptxas
  // counts all loads of the loop on one scoreboard (CUDA 13.0), so a wait for one is a wait for all.
  FI_DEVICE void produce_halves(int range, int first) const {
    const Rows rows{params};
    auto at = PipelineState::producer();
    const int lane = threadIdx.x % 32, quad = lane % 4, row = first / 2 + threadIdx.x / 32 * 8 + lane / 4;
    const int chunk = swizzled_offset(row, quad * 2), next_chunk = swizzled_offset(row, quad * 2 + 1);
    const unsigned distance = Rows::distance(&shared, first / kRows ^ 1);
    if (threadIdx.x == 0) shared.scheduler.enter(params.view(), range);
    for (int use = 0;; ++use) {
      const MlaWork* found = next_work_tile(use);
      if (!found) break;
      const MlaWork& s = *found;
      const int high = this->high(s, first), begin = s.begin;
      // Odd lanes look up the other CTA's key in the same place.
      int entry;
      typename Rows::Source now;
      unsigned exist;  // bits 0 to 7: the keys of this warp, 8 to 15: those of the other CTA
      const auto look_up_half = [&](int tile) { entry = rows.look_up(s, tile * kKeys + (row ^ lane % 2 * 32), high); };
      const auto find = [&](int tile) {
        const int page = params.checked_page(entry);
        exist = __ballot_sync(0xffffffffu, __shfl_sync(0xffffffffu, page, lane * 4 % 32 + lane / 8 % 2) >= 0);
        now = rows.source(tile * kKeys + row, __shfl_sync(0xffffffffu, page, lane / 4 * 4));
        look_up_half(tile + 1);
      };
      typename Rows::RawRope rope;
      typename Rows::RawPart raw[2];
      const auto load = [&](int tile) {
        find(tile);
        rows.load_rope(rope, now, quad);
        const int part = part_of(tile - begin, 0);
#pragma unroll
        for (int n = 0; n < 2; ++n) rows.load_part(raw[n], now, part ^ n, quad);
      };
      look_up_half(begin);
      load(begin);
      shared.q_empty.wait(use % 2 ^ 1);
      load_queries(s, first_row(s, first), threadIdx.x, kWarpgroup);
      shared.q_full.arrive_copies();  // order: thread: every thread arrives for its own copies
      for (int tile = begin; tile * kKeys < high; ++tile) {
        const auto target = [&](int part) {
          char* to = reinterpret_cast<char*>(shared.kv[at.stage][part * kPartBlocks]);
          return typename Rows::Target{to + chunk, to + next_chunk};
        };
        // Shows what the warp has stored to its bulk copies and to wgmma of the consumers, which do not fence.
        const auto publish = [&] {
          fence_async_shared();  // order: writer: every lane for its own stores, then the warp meets
          __syncwarp();
        };
        // Eight rows of a block lie together. The other CTA sends as much as this one.
        const auto commit = [&](int part, int blocks) {
          if (lane != 0) return;
          const unsigned barrier = shared.full[at.stage][part].address() + distance;
#pragma unroll
          for (int k = 0; k < kPartBlocks; ++k)
            if (k < blocks) {
              const unsigned from = Rows::shared_address(shared.kv[at.stage][part * kPartBlocks + k]) + row / 8 * 1024;
              bulk_send(from + distance, from, 1024, barrier);
            }
          if (threadIdx.x == 0)
            shared.full[at.stage][part].arrive_expect(blocks * kBlock);
          else
            shared.full[at.stage][part].arrive();  // order: lane: behind the fences of `publish`
        };
        const auto store_rope = [&] {
          shared.empty[at.stage][2].wait(at.phase);
          if (params.wide_rope)
            target(2).store(0, rope.pieces[0], rope.pieces[1]);
          else
            rows.store_dequantized(target(2), 0, rope.pieces[0], MlaFactor<MlaScale::kAny>(params.rope_factor));
          if (lane == 0) {
            auto* exists = reinterpret_cast<unsigned char*>(shared.exists[at.stage]);
            exists[row / 8] = static_cast<unsigned char>(exist);
            exists[(row ^ 32) / 8] = static_cast<unsigned char>(exist >> 8);
          }
        };
        int part = part_of(tile - begin, 0);
#pragma unroll
        for (int n = 0; n < 2; ++n, part ^= 1) {
          shared.empty[at.stage][part].wait(at.phase);
          rows.store_part(target(part), raw[n]);
          if (n == 1) store_rope();  // behind the same fence
          publish();
          commit(part, kPartBlocks);
          if (n == 1) commit(2, 1);
        }
        load(tile + 1);
        at.advance(kStages);
      }
      shared.work_pipeline.release_warp(use % 2, lane);
    }
    pdl_launch_dependents();
  }
};

}  // namespace fi
