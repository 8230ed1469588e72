// The producer warps of the Hopper prefill kernels: a tile scheduler warp, and producers of Q, K and V by TMA, or of K
// and V by cp.async where pages are small.
#pragma once
#include "fi/attention/prefill/batch_prefill.h"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/tile_scheduler.cuh"
#include "fi/cuda/tma_tile_sm90.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

// The work tile of a CTA: query tokens [token, token + tokens) of a request and one kv head, split split_idx of
// num_splits of its KV tiles. split_tile is its number among the tiles that are split. tokens 0: the schedule is empty.
struct WorkTile {
  PrefillRequest request;
  int32_t kv_head, token, tokens, split_idx, num_splits, split_tile;
};

// Shared: q, k, v, work, and a pipeline for each. Packed rows r = token * group + head of the group: a tile
// reads each key once for all heads that share it. Tiles are in the 128-byte swizzle, [dim / kColumns][rows][kColumns],
// or keys and values [rows / 8][dim / kColumns][8][kColumns] where copies load whole rows.
template <class Shared, class T, int kDimQK, int kKeys, bool kWholeRows>
struct PrefillProducers {
  static constexpr int kRows = sizeof(Shared::q[0]) / (kDimQK * sizeof(T));

  // A work tile and its KV tiles [begin, begin + count), which every role computes.
  struct Tile : WorkTile {
    Mask mask;
    int begin, count;

    FI_DEVICE Tile(const BatchPrefillParams& p, const WorkTile& work) : WorkTile(work) {
      mask = Mask::of_range(p.causal, p.window_left, request.qo_len, request.kv_len);
      begin = mask.first_key(token) / kKeys;
      count = (mask.end_key(token + tokens - 1) + kKeys - 1) / kKeys - begin;
      if (num_splits > 1) {
        const int before = count * split_idx / num_splits;
        begin += before;
        count = count * (split_idx + 1) / num_splits - before;
      }
    }
  };

  const BatchPrefillParams& p;
  Shared& shared;

  // Work tile number `index` of the schedule. split_idx == num_splits: it is empty.
  FI_DEVICE WorkTile work(int index, const PrefillHeader& plan) const {
    const int after = index - plan.first_split, max_splits = after < 0 ? 1 : plan.max_splits;
    const int unsplit = max_splits > 1 ? plan.first_split + after / max_splits : index;
    if (unsplit >= plan.num_tiles * p.kv_heads) return {{0, 0, 0, 0}, 0, 0, 0, 0, 1, 0};
    const int section = unsplit / (plan.num_tiles * p.l2_kv_heads),
              in_section = unsplit - section * plan.num_tiles * p.l2_kv_heads;
    const int heads = min(p.l2_kv_heads, p.kv_heads - section * p.l2_kv_heads), q_tile = in_section / heads;
    const PrefillWorkTile found = p.schedule.tiles[q_tile];
    const PrefillRequest request = p.schedule.requests[found.request];
    const int token = found.q_tile * plan.tile_tokens, tokens = min(plan.tile_tokens, request.qo_len - token);
    WorkTile work{request, section * p.l2_kv_heads + in_section - q_tile * heads, token, tokens, 0, 1, 0};
    if (max_splits > 1) {
      work.split_tile = unsplit - plan.first_split;
      work.num_splits =
          min(max_splits, max(1, (Tile(p, work).count + plan.min_split_tiles - 1) / plan.min_split_tiles));
      work.split_idx = min(after - work.split_tile * max_splits, work.num_splits);
    }
    return work;
  }

  // The tile scheduler warp: publishes work tiles, with kQueries also copies the queries of each, then zeros padding
  // rows.
  template <bool kQueries>
  FI_DEVICE void schedule() const {
    if (threadIdx.x % 32 == 0) publish_tiles<kQueries>();
    __syncwarp();
    clear_padding();
  }
  // Zeros the output rows of no request.
  FI_DEVICE void clear_padding() const {
    const PaddingRows padding = PaddingRows::of(p.padded_rows, p.batch, p.schedule.requests);
    const int bytes = out_bytes(p.out_type), count = padding.count() * p.qo_heads;
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
      const int row = i / p.qo_heads, head = i - row * p.qo_heads;
      char* out = static_cast<char*>(p.out) + (padding.row(row) * p.out_token + head * p.out_head) * bytes;
      for (int j = threadIdx.x % 32 * 16; j < p.head_dim_vo * bytes; j += 512) store_global(out + j, uint4{0, 0, 0, 0});
    }
  }
  // A CTA takes one work tile ahead, no more: tiles that it holds late in the kernel leave other CTAs idle. H200: one
  // sequence of 16k 3147 -> 3102 us, four of 4k and 128 heads of 192 4344 -> 4279.
  template <bool kQueries>
  FI_DEVICE void publish_tiles() const {
    const PrefillHeader plan = *p.schedule.header;
    int index = blockIdx.x;
    for (int use = 0;;) {
      WorkTile now;
      for (;; index = take()) {
        now = work(index, plan);
        if (now.split_idx < now.num_splits) break;
      }
      const auto at = PipelineState::consumer_at<2>(use);
      shared.work[at.stage] = now;
      shared.work_pipeline.commit(at.stage);
      if (now.tokens == 0) break;
      if (kQueries) copy_queries(now, use);
      ++use;
      shared.work_pipeline.acquire(PipelineState::producer_at<2>(use));
      index = take();
    }
    retire_cta(&p.schedule.header->next_work, &p.schedule.header->ctas_done);
  }
  FI_DEVICE int take() const { return take_tile(&p.schedule.header->next_work) + static_cast<int>(gridDim.x); }

  // Copies the queries of every tile.
  FI_DEVICE void produce_queries() const {
    for (int use = 0;; ++use) {
      const auto at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(at);
      const WorkTile work = shared.work[at.stage];
      if (work.tokens == 0) break;
      shared.work_pipeline.release(at.stage);
      copy_queries(work, use);
    }
  }
  FI_DEVICE void copy_queries(const WorkTile& work, int use) const {
    auto& pipeline = shared.q_pipeline;
    const auto at = PipelineState::producer_at<decltype(Shared::q_pipeline)::kStages>(use);
    pipeline.acquire(at);
    Barrier& full = pipeline.expect(at.stage, p.tile_tokens * p.group_size.value * kDimQK * sizeof(T));
    tma_load_tile<kDimQK>(shared.q[at.stage], kRows * 128 / sizeof(T), p.q, full, 0, 0, work.kv_head,
                          work.request.qo_begin + work.token);
  }

  // Copies the keys or the values of every tile, last key tile first.
  // NOTE: the barriers of a Pipeline, one array each. Selected by way of the Pipeline, ptxas spills at head_dim 128.
  template <int kDim, int kStages, class KV>
  FI_DEVICE void produce(const TensorMap& from, KV (&to)[kStages][kKeys * kDim], Barrier (&full)[kStages],
                         Barrier (&empty)[kStages]) const {
    constexpr int kColumns = 128 / sizeof(KV);
    const int boxes = kKeys / p.box_keys, lane = threadIdx.x % 32;
    auto at = PipelineState::producer();
    for_each_tile([&](const Tile& tile) {
      if (tile.count == 0) return;
      int2 next = locate(tile, (tile.begin + tile.count - 1) * kKeys + lane * p.box_keys);
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j) {
        int2 now = next;
        if (j > tile.begin)
          next = locate(tile, (j - 1) * kKeys + lane * p.box_keys);  // loads while the stage is acquired
        empty[at.stage].wait(at.phase);
        if (lane == 0) full[at.stage].arrive_expect(kKeys * kDim * sizeof(KV));
        KV* line = to[at.stage];
        for (int first = 0; first < boxes; first += 32) {
          if (first > 0) now = locate(tile, j * kKeys + (first + lane) * p.box_keys);
          const int count = min(32, boxes - first);
          for (int b = 0; b < count; ++b, line += p.box_keys * (kWholeRows ? kDim : kColumns)) {
            const int token = __shfl_sync(0xffffffffu, now.x, b), page = __shfl_sync(0xffffffffu, now.y, b);
            if (lane > 0) continue;
            if constexpr (kWholeRows) {
              tma_load(line, from, full[at.stage], 0, 0,
                       p.heads_in_column_blocks ? tile.kv_head * (kDim / kColumns) : 0,
                       token / 8 + tile.kv_head * p.row_groups_per_head, page);
            } else {
              tma_load_tile<kDim>(line, kKeys * kColumns, from, full[at.stage], 0, token, tile.kv_head, page);
            }
          }
        }
        at.advance(kStages);
      }
    });
  }

  // Copies the keys or the values of every tile by cp.async, last key tile first. Keys from kv_len on and keys of pages
  // outside of the pool become zeros. By a warp: eight lanes copy 128 bytes of a row. `landed` gets an arrival of each
  // lane.
  template <int kDim, int kStages, class KV>
  FI_DEVICE void gather(const KvRows& from, KV (&to)[kStages][kKeys * kDim], Barrier (&landed)[kStages],
                        Barrier (&empty)[kStages]) const {
    constexpr int kBlocks = kDim * sizeof(KV) / kSwizzleLineBytes, kBatches = (kKeys + 31) / 32;
    const int lane = threadIdx.x % 32, row = lane / 8, chunk = lane % 8;
    const int even = swizzled_offset(row, chunk), odd = swizzled_offset(row + 4, chunk);
    auto at = PipelineState::producer();
    for_each_tile([&](const Tile& tile) {
      const char* head = static_cast<const char*>(from.data) + tile.kv_head * from.head;
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j) {
        int pages[kBatches];  // of key `lane` of each 32; they load while the stage is acquired
#pragma unroll
        for (int i = 0; i < kBatches; ++i) pages[i] = page(tile, j * kKeys + i * 32 + lane);
        empty[at.stage].wait(at.phase);
        auto line = static_cast<unsigned>(__cvta_generic_to_shared(to[at.stage]));
#pragma unroll
        for (int i = 0; i < kBatches; ++i) {
          const int key = j * kKeys + i * 32 + lane;
          const bool exists = key < tile.request.kv_len && static_cast<unsigned>(pages[i]) <= p.last_page;
          const unsigned all = __ballot_sync(0xffffffffu, exists) >> row;
          const char* mine = head + (exists ? pages[i] * from.page + slot(key) * from.token : 0);
#pragma unroll 2
          for (int first = 0; first < min(32, kKeys - i * 32); first += 8, line += 8 * 128) {
#pragma unroll
            for (int half = 0; half < 8; half += 4) {
              const char* source = reinterpret_cast<const char*>(
                  __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(mine), first + half + row) + chunk * 16);
#pragma unroll
              for (int block = 0; block < kBlocks; ++block)
                cp_async_16(line + (half ? odd : even) + block * kKeys * 128, source + block * 128,
                            all >> (first + half) & 1);
            }
          }
        }
        landed[at.stage].arrive_copies();
        at.advance(kStages);
      }
    });
  }
  FI_DEVICE int page(const Tile& tile, int key) const {
    return p.page_indices[tile.request.kv_begin +
                          static_cast<int>(divide(min(key, tile.request.kv_len - 1), p.page_size))];
  }
  FI_DEVICE int slot(int key) const {
    return key - static_cast<int>(divide(key, p.page_size) * p.page_size.value);
  }

  // Makes copies of cp.async, which write through the generic proxy, visible to wgmma, which reads through the async
  // proxy. By a warp, so that consumers need no fence.
  FI_DEVICE void relay_copies() const {
    auto at = PipelineState();
    for_each_tile([&](const Tile& tile) {
      for (int i = 0; i < tile.count; ++i) {
        relay(shared.k_landed, shared.k_pipeline, at);
        relay(shared.v_landed, shared.v_pipeline, at);
        at.advance(decltype(Shared::k_pipeline)::kStages);
      }
    });
  }
  template <int kStages>
  FI_DEVICE static void relay(Barrier (&landed)[kStages], Pipeline<kStages>& pipeline, const PipelineState& at) {
    landed[at.stage].wait(at.phase);
    fence_async_shared();
    if (threadIdx.x % 32 == 0) pipeline.commit(at.stage);
  }

  // Calls body(tile) for each work tile of this CTA. By a warp, which copies the tile and then releases it.
  template <class Body>
  FI_DEVICE void for_each_tile(Body&& body) const {
    for (int use = 0;; ++use) {
      const auto at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(at);
      const Tile tile(p, shared.work[at.stage]);
      if (tile.tokens == 0) break;
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.work_pipeline.release(at.stage);
      body(tile);
    }
  }

  // The token in its page and the page of a key. Beyond the last key: any page that exists.
  FI_DEVICE int2 locate(const Tile& tile, int key) const {
    if (!p.page_indices) return {tile.request.kv_begin + key, 0};
    const int known = min(key, tile.request.kv_len - 1), entry = divide(known, p.page_size);
    const int token = key == known ? key - entry * static_cast<int>(p.page_size.value) : 0;
    return {token, p.page_indices[tile.request.kv_begin + entry]};
  }
};

}  // namespace fi
