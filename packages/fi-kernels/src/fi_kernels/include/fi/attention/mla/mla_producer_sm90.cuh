// The producer warpgroup of wide q tiles on Hopper: loads queries and KV tiles, and publishes work tiles.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/attention/mla/mla_widen.cuh"
#include "fi/attention/mla/mla_work_tiles_sm90.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

// kTma: KV tiles lie in whole pages and are loaded by TMA; otherwise by cp.async, from pages of any size. An e4m3 cache
// is loaded to registers and stored as 16-bit values times their scales. NOTE: the two CTAs of a cluster need the same
// tiles. Each loading half of a tile for both by multicast is slower: H200, b128 kv4k h128 317 us, without 256; b16
// kv8k h128 99 us, 82. A stage is then free when both CTAs have read it.
template <class T, class KV, bool kTma>
struct MlaProducer {
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static_assert(!(kFp8 && kTma));
  static constexpr int kRows = 64, kKeys = kMlaKvTile, kStages = 2;
  static constexpr int kBlocks = kMlaWidth / 64, kLatentBlocks = kMlaLatent / 64;  // of 64 columns
  // A stage is filled and freed in parts: the half of the latent columns that consumer warpgroup 0 multiplies with,
  // that of warpgroup 1, and the rotary block.
  static constexpr int kParts = 3, kPartBlocks = 4;
  static constexpr int kBlock = 64 * 64;  // elements
  // A cluster brings a tile to L2 while the producers wait for a stage for the one before: H200, b128 kv4k h128 268.6
  // us to 265.0, b16 kv8k h128 85.5 to 82.0; two tiles ahead 268.9 and 84.7. A CTA alone reads as fast as memory gives:
  // b64 kv8k h64 177.9 us, with this 187.1.
  static constexpr int kAhead = 1;
  // Batches of fewer KV tiles (100 MB) are the first that L2 evicts: as in batch decode.
  static constexpr int kEvictFirstTiles = (100 << 20) / (kKeys * kMlaWidth * 2);

  struct Shared {
    alignas(1024) T q[kBlocks][kBlock];
    alignas(1024) T kv[kStages][kBlocks][kBlock];
    alignas(1024) T p[kBlock];  // probabilities of one KV tile: who reads one writes the next
    float row_max[kRows], alpha[kRows], row_sum[2][kRows];
    MlaWorkTile work[2];                           // index -1: no more
    alignas(8) unsigned short exists[kStages][4];  // bit r: key 16 w + r of the stage exists; not by TMA
    Barrier full[kStages][kParts], empty[kStages][kParts], q_full, q_empty, p_full;
    Pipeline<2> work_pipeline;
    MlaTileScheduler scheduler;  // of an e4m3 cache, where registers are few
  };

  const BatchMlaParams& params;
  Shared& shared;

  // By one thread.
  FI_DEVICE void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int part = 0; part < kParts; ++part)
        shared.full[stage][part].init(kTma ? 1 : part == 2 ? kWarpgroup + 4 : kFp8 ? 4 : kWarpgroup);
      for (Barrier& empty : shared.empty[stage]) empty.init(4);
    }
    shared.q_full.init(kTma ? 96 : kWarpgroup);
    shared.q_empty.init(8);
    shared.p_full.init(kWarpgroup);
    shared.work_pipeline.init(1, kFp8 ? 12 : 8);
    fence_barrier_init();
    if (kTma) {
      prefetch_tensor_map(params.ckv_map);
      prefetch_tensor_map(params.kpe_map);
    }
  }

  // The key after the last one that the CTA loads.
  FI_DEVICE int high(const MlaWorkTile& s, int first) const { return params.high(s, first_row(s, first), kRows); }
  // By a consumer warp: four of them use a part last.
  FI_DEVICE void release(int stage, int part) const {
    if (threadIdx.x % 32 == 0) shared.empty[stage][part].arrive();
  }
  // The order in which warpgroup j % 2 reads the parts of KV tile j.
  FI_DEVICE static int part_of(int j, int i) { return i == 2 ? 2 : (i ^ j) & 1; }

  // By the producer warpgroup. first: the first row of this CTA in a q tile.
  FI_DEVICE void run(int range, int first) const {
    if constexpr (kFp8) return produce_widened(range, first);
    MlaTileScheduler scheduler;
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
  FI_DEVICE void load_queries(const MlaWorkTile& s, int row0, int thread, int threads) const {
    const int rows = s.request.qo_len * static_cast<int>(params.heads.value);
#pragma unroll 1
    for (int i = thread; i < kRows * 8; i += threads) {
      const int r = i / 8, chunk = i % 8;
      const bool valid = row0 + r < rows;
      const auto row = params.row(valid ? row0 + r : 0);
      const int64_t token = s.request.qo_begin + row.token;
      const T* nope = static_cast<const T*>(params.q_nope) + token * params.q_nope_token +
                      row.head * params.q_nope_head + chunk * 8;
      char* to = reinterpret_cast<char*>(shared.q) + swizzled_offset(r, chunk);
#pragma unroll
      for (int block = 0; block < kLatentBlocks; ++block)
        cp_async_16(to + block * (kBlock * 2), nope + block * 64, valid);
      const T* pe = static_cast<const T*>(params.q_pe) + token * params.q_pe_token + row.head * params.q_pe_head;
      cp_async_16(to + kLatentBlocks * (kBlock * 2), pe + chunk * 8, valid);
    }
  }
  FI_DEVICE void load_all_queries(MlaTileScheduler& scheduler, int first, int begin, int threads) const {
    MlaWorkTile s;
    for (int use = 0; scheduler.next(s); ++use) {
      shared.q_empty.wait(use % 2 ^ 1);
      load_queries(s, first_row(s, first), static_cast<int>(threadIdx.x) - begin, threads);
      shared.q_full.arrive_copies();
    }
  }

  FI_DEVICE void produce_tma(MlaTileScheduler& scheduler, int first) const {
    MlaWorkTile s;
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
        if (lane == 0) {
          if (params.cluster > 1 && i + kAhead >= kStages && (tile + kAhead) * kKeys < high)
            prefetch_tile(policy, first, later, later_token);
#pragma unroll
          for (int n = 0; n < kParts; ++n) {
            const int part = part_of(i, n), blocks = n < 2 ? kPartBlocks : 1;
            shared.empty[at.stage][part].wait(at.phase);
            Barrier& full = shared.full[at.stage][part];
            full.arrive_expect(blocks * kBlock * 2);
#pragma unroll
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
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      if (b % params.cluster == first / kRows)
        tma_prefetch_hinted(b < kLatentBlocks ? params.ckv_map : params.kpe_map, policy, b < kLatentBlocks ? b * 64 : 0,
                            token, page);
  }

  // By cp.async: warp w loads keys 16 w .. 16 w + 15 of a tile, four at a time with eight lanes for each.
  FI_DEVICE void produce(MlaTileScheduler& scheduler, int first) const {
    MlaWorkTile s;
    auto at = PipelineState::producer();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 8, chunk = lane % 8;
    for (int use = 0; publish_next(scheduler, shared, s, use, threadIdx.x == 0); ++use) {
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
      shared.q_full.arrive_copies();
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
              shared.full[at.stage][part].arrive();
            }
          }
          shared.full[at.stage][part].arrive_copies();
        }
        at.advance(kStages);
      }
    }
    pdl_launch_dependents();
  }

  // From an e4m3 cache: warp w has keys 16 w .. 16 w + 15 of a tile, a lane 16 columns of each 64 of two keys, `key`
  // and key + 8. Lanes store 16 bytes of eight different bank groups.
  struct Source {
    int page[2], slot[2];  // page -1: no token
  };
  // Their entries of the page table, one part of a tile ahead of `source`, which waits for them.
  FI_DEVICE void look_up(const MlaWorkTile& s, int key, int high, int (&entries)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto index = static_cast<int>(divide(static_cast<uint32_t>(key + 8 * i), params.page_size));
      entries[i] = key + 8 * i < high ? params.page_indices[s.request.first_page + index] : -1;
    }
  }
  FI_DEVICE Source source(int key, const int (&entries)[2]) const {
    Source x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto index = static_cast<int>(divide(static_cast<uint32_t>(key + 8 * i), params.page_size));
      x.slot[i] = key + 8 * i - index * static_cast<int>(params.page_size.value);
      x.page[i] = params.checked_page(entries[i]);
    }
    return x;
  }
  // Not to be read where there is no token.
  FI_DEVICE const char* ckv_row(const Source& x, int i, int column) const {
    return static_cast<const char*>(params.ckv) + params.ckv_offset(x.page[i], x.slot[i]) + column;
  }
  FI_DEVICE const char* kpe_row(const Source& x, int i, int column) const {
    const int64_t at = params.kpe_offset(x.page[i], x.slot[i]) + column;
    return static_cast<const char*>(params.kpe) + (params.wide_rope ? 2 * at : at);
  }
  // A part of a key's latent columns, and the scales of its two groups of 128.
  struct RawPart {
    uint4 pieces[kPartBlocks];
    float2 scales;
  };
  FI_DEVICE void load_part(RawPart& raw, const Source& x, int i, int part, int quad) const {
    const char* from = ckv_row(x, i, part * (kPartBlocks * 64) + quad * 16);
    const bool exists = x.page[i] >= 0;
#pragma unroll
    for (int k = 0; k < kPartBlocks; ++k)
      raw.pieces[k] = exists ? load_once(from + k * 64, params.cluster > 1 || params.sparse) : uint4{0, 0, 0, 0};
    raw.scales = make_float2(1.f, 1.f);
    if (params.ckv_scales && exists)
      raw.scales = *reinterpret_cast<const float2*>(params.ckv_scales + x.page[i] * params.scales_page +
                                                    x.slot[i] * params.scales_token + part * 2);
  }
  // 16 values as two chunks of 16 bytes at `to` and `other`.
  template <MlaScale kScale>
  FI_DEVICE static void store_widened(char* to, char* other, const uint4& raw, const MlaFactor<kScale>& factor) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    unsigned pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = factor.times(mla_shifted(words[i / 2], i % 2 ? kMlaUpper : kMlaLower, T()));
    *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    *reinterpret_cast<uint4*>(other) = {pairs[4], pairs[5], pairs[6], pairs[7]};
  }
  template <MlaScale kScale>
  FI_DEVICE static void store_part(char* to, char* other, const RawPart& raw) {
    const MlaFactor<kScale> factors[2] = {raw.scales.x, raw.scales.y};
#pragma unroll
    for (int k = 0; k < kPartBlocks; ++k)
      store_widened(to + k * (kBlock * 2), other + k * (kBlock * 2), raw.pieces[k], factors[k / 2]);
  }
  FI_DEVICE void store_part(char* to, char* other, const RawPart& raw) const {
    if (!params.ckv_scales)
      store_part<MlaScale::kNone>(to, other, raw);
    else if (!__any_sync(0xffffffffu, mla_is_large(raw.scales.x) || mla_is_large(raw.scales.y)))
      store_part<MlaScale::kSmall>(to, other, raw);
    else
      store_part<MlaScale::kAny>(to, other, raw);
  }

  // NOTE: without fence_async_shared, which is left to the consumers: ptxas puts MEMBAR in front of it, which waits for
  // the loads in flight.
  FI_DEVICE void produce_widened(int range, int first) const {
    auto at = PipelineState::producer();
    const int lane = threadIdx.x % 32, quad = lane % 4, row = threadIdx.x / 32 * 16 + lane / 4;
    const int chunk = swizzled_offset(row, quad * 2), next_chunk = swizzled_offset(row, quad * 2 + 1);
    if (threadIdx.x == 0) shared.scheduler.enter(params.view(), range);
    for (int use = 0;; ++use) {
      const auto work_at = PipelineState::producer_at<2>(use);
      if (threadIdx.x == 0) {
        shared.work_pipeline.acquire(work_at);
        MlaWorkTile& next = shared.work[work_at.stage];
        if (!shared.scheduler.next(next)) next.index = -1;
        shared.work_pipeline.commit(work_at.stage);
      }
      __syncwarp();
      shared.work_pipeline.wait(PipelineState::consumer_at<2>(use));
      const MlaWorkTile& s = shared.work[work_at.stage];
      if (uniform(s.index) < 0) break;
      const int high = this->high(s, first), begin = s.begin;
      int entries[2];
      look_up(s, begin * kKeys + row, high, entries);
      Source now = source(begin * kKeys + row, entries);
      look_up(s, (begin + 1) * kKeys + row, high, entries);
      RawPart raw[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_part(raw[i], now, i, 0, quad);
      shared.q_empty.wait(use % 2 ^ 1);
      load_queries(s, first_row(s, first), threadIdx.x, kWarpgroup);
      shared.q_full.arrive_copies();
      for (int tile = begin; tile * kKeys < high; ++tile) {
        char* stage = reinterpret_cast<char*>(shared.kv[at.stage]);
        // The rotary block was read first of the tile before in this stage.
        shared.empty[at.stage][2].wait(at.phase);
        char* ropes_to = stage + kLatentBlocks * (kBlock * 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* from = kpe_row(now, i, quad * 16);
          const bool exists = now.page[i] >= 0;
          cp_async_16(ropes_to + chunk + i * 8 * 128, from, exists);
          if (params.wide_rope) cp_async_16(ropes_to + next_chunk + i * 8 * 128, from + 16, exists);
        }
        if (params.wide_rope)
          shared.full[at.stage][2].arrive_copies();
        else
          cp_async_commit();
        // Lanes 0 to 15 ask whether their key exists.
        const int page = __shfl_sync(0xffffffffu, now.page[0], lane * 4 % 32),
                  other = __shfl_sync(0xffffffffu, now.page[1], lane * 4 % 32);
        const unsigned exist = __ballot_sync(0xffffffffu, (lane < 8 ? page : other) >= 0);
        if (lane == 0) {
          shared.exists[at.stage][threadIdx.x / 32] = static_cast<unsigned short>(exist);
          shared.full[at.stage][2].arrive();
        }
        int part = part_of(tile - begin, 0);
#pragma unroll
        for (int n = 0; n < 2; ++n, part ^= 1) {
          char* to = stage + part * (kPartBlocks * kBlock * 2);
          // The parts of a tile come in the reverse order of those before.
          const int next_part = n ? part : part ^ 1;
          if (n) {  // of the next tile
            now = source((tile + 1) * kKeys + row, entries);
            look_up(s, (tile + 2) * kKeys + row, high, entries);
          }
          shared.empty[at.stage][part].wait(at.phase);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            store_part(to + chunk + i * 8 * 128, to + next_chunk + i * 8 * 128, raw[i]);
            load_part(raw[i], now, i, next_part, quad);
            __syncwarp();  // else ptxas puts the loads behind the stores of the other key
          }
          if (lane == 0) shared.full[at.stage][part].arrive();
          if (n == 0 && !params.wide_rope) {  // this thread's bytes have arrived where their values will be
            cp_async_wait<0>();
            const MlaFactor<MlaScale::kAny> factor(params.rope_factor);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              char* to = ropes_to + chunk + i * 8 * 128;
              store_widened(to, ropes_to + next_chunk + i * 8 * 128, *reinterpret_cast<const uint4*>(to), factor);
            }
            shared.full[at.stage][2].arrive();
          }
        }
        at.advance(kStages);
      }
      __syncwarp();
      if (lane == 0) shared.work_pipeline.release(work_at.stage);
    }
    pdl_launch_dependents();
  }
};

}  // namespace fi
