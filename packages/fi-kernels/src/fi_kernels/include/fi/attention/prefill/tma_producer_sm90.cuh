// The producer warps of the Hopper prefill kernels: a tile scheduler warp, and producers of Q, K and V by TMA, or of K
// and V by cp.async where pages are small.
#pragma once
#include "fi/attention/paged_kv.cuh"
#include "fi/attention/prefill/batch_prefill.h"
#include "fi/attention/variant.h"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/tile_scheduler.cuh"
#include "fi/cuda/tma_tile_sm90.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

// The number of a request, which only a variant of a user needs.
template <bool kKept>
struct RequestNumber {
  int32_t value;
  FI_DEVICE void set(int32_t number) { value = number; }
  FI_DEVICE int32_t get() const { return value; }
};
template <>
struct RequestNumber<false> {
  FI_DEVICE void set(int32_t) {}
  FI_DEVICE int32_t get() const { return 0; }
};

// The work tile of a CTA: query tokens [token, token + tokens) of a request and one kv head, split split_idx of
// num_splits of its KV tiles. split_tile is its number among the tiles that are split. KV tile j begins with key
// origin + j * kKeys: near the window, not at a multiple of kKeys, so that tiles are few. tokens 0: the schedule is
// empty.
struct WorkTile {
  PrefillRequest request;
  int32_t kv_head, token, tokens, split_idx, num_splits, split_tile, origin, begin, count;
  RequestNumber<Variant::kCustom> number;
};

// Shared: q, k, v, work, and a pipeline for each. Packed rows r = token * group + head of the group: a tile
// reads each key once for all heads that share it. Tiles are in the 128-byte swizzle, [dim / kColumns][rows][kColumns],
// or keys and values [rows / 8][dim / kColumns][8][kColumns] where copies load whole rows.
template <class Shared, class T, int kDimQK, int kKeys, bool kWholeRows>
struct PrefillProducers {
  static constexpr int kRowBytes = (kDimQK * sizeof(T) + 127) / 128 * 128;  // of a query in shared memory
  static constexpr int kRows = sizeof(Shared::q[0]) / kRowBytes;

  // A work tile with its mask, which every role computes.
  struct Tile : WorkTile {
    Mask mask;

    FI_DEVICE Tile(const BatchPrefillParams& p, const WorkTile& work) : WorkTile(work) {
      mask = Mask::of_range(p.problem.mask.causal, p.problem.mask.window_left, request.qo_len, request.kv_len);
    }
    FI_DEVICE int key(int j) const { return origin + j * kKeys; }
  };

  const BatchPrefillParams& p;
  Shared& shared;

  // Work tile number `index` of the schedule. split_idx == num_splits: it is empty.
  FI_DEVICE WorkTile work(int index, const PrefillHeader& plan) const {
    const int after = index - plan.first_split, max_splits = after < 0 ? 1 : plan.max_splits;
    const int unsplit = max_splits > 1 ? plan.first_split + after / max_splits : index;
    if (unsplit >= plan.num_tiles * p.problem.kv_heads) return {{0, 0, 0, 0}, 0, 0, 0, 0, 1, 0, 0, 0, 0};
    const int section = unsplit / (plan.num_tiles * p.copies.l2_kv_heads),
              in_section = unsplit - section * plan.num_tiles * p.copies.l2_kv_heads;
    const int heads = min(p.copies.l2_kv_heads, p.problem.kv_heads - section * p.copies.l2_kv_heads),
              q_tile = in_section / heads;
    const PrefillWorkTile found = p.schedule.tiles[q_tile];
    const PrefillRequest request = p.schedule.requests[found.request];
    const int token = found.q_tile * plan.tile_tokens, tokens = min(plan.tile_tokens, request.qo_len - token);
    WorkTile work{request, section * p.copies.l2_kv_heads + in_section - q_tile * heads, token, tokens, 0, 1, 0, 0, 0,
                  0};
    const Mask mask = Mask::of_range(p.problem.mask.causal, p.problem.mask.window_left, request.qo_len, request.kv_len);
    work.origin = static_cast<int>(divide(mask.first_key(token), p.copies.key_step) * p.copies.key_step.value);
    work.count = (mask.end_key(token + tokens - 1) - work.origin + kKeys - 1) / kKeys;
    work.number.set(found.request);
    if (max_splits > 1) {
      work.split_tile = unsplit - plan.first_split;
      work.num_splits = min(max_splits, max(1, (work.count + plan.min_split_tiles - 1) / plan.min_split_tiles));
      work.split_idx = min(after - work.split_tile * max_splits, work.num_splits);
      work.begin = work.count * work.split_idx / work.num_splits;
      work.count = work.count * (work.split_idx + 1) / work.num_splits - work.begin;
    }
    return work;
  }

  // The tile scheduler warp: publishes work tiles, with kQueries also copies the queries of each, then zeros padding
  // rows.
  FI_DEVICE void schedule(bool queries) const {
    publish_tiles(queries);
    clear_padding();
  }
  // Zeros the output rows of no request.
  FI_DEVICE void clear_padding() const {
    const PaddingRows padding = PaddingRows::of(p.padded_rows, p.batch_size, p.schedule.requests);
    const int bytes = out_bytes(p.problem.out_type), count = padding.count() * p.problem.qo_heads;
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
      const int row = i / p.problem.qo_heads, head = i - row * p.problem.qo_heads;
      char* out = static_cast<char*>(p.problem.out) +
                  (padding.row(row) * p.problem.out_token + head * p.problem.out_head) * bytes;
      for (int j = threadIdx.x % 32 * 16; j < p.problem.head_dim_vo * bytes; j += 512)
        store_global(out + j, uint4{0, 0, 0, 0});
    }
  }
  // A CTA takes one work tile ahead, no more: tiles that it holds late in the kernel leave other CTAs idle
  // (docs/notes/prefill-schedule.md).
  // NOTE: whole warps wait for barriers. A single lane is not suspended, and takes a sixth of the issue slots of its SM
  // partition.
  FI_DEVICE void publish_tiles(bool queries) const {
    const PrefillHeader plan = *p.schedule.header;
    int use = 0;
    for (int index = blockIdx.x;; index = after(index)) {
      const WorkTile now = work(index, plan);
      if (now.split_idx == now.num_splits) continue;
      const auto at = PipelineState::consumer_at<2>(use);
      if (leads()) {
        shared.work[at.stage] = now;
        shared.work_pipeline.commit(at.stage);
      }
      __syncwarp();
      if (now.tokens == 0) break;
      if (queries) copy_queries(shared.work[at.stage], use);  // fewer registers than of `now`
      ++use;
      shared.work_pipeline.acquire(PipelineState::producer_at<2>(use));
    }
    if (leads()) retire_cta(&p.schedule.header->next_work, &p.schedule.header->ctas_done);
    __syncwarp();
  }
  // The work tile that this CTA takes after `index`. Of the second wave, which is taken while the first runs, the CTA
  // with the longest tile has the shortest.
  FI_DEVICE int after(int index) const {
    const int ctas = gridDim.x;
    if (index < ctas) return 2 * ctas - 1 - index;
    const int taken = leads() ? take_tile(&p.schedule.header->next_work) : 0;
    return __shfl_sync(0xffffffffu, taken, 0) + 2 * ctas;
  }
  FI_DEVICE static bool leads() { return threadIdx.x % 32 == 0; }

  // Copies the queries of every tile. By a warp.
  FI_DEVICE void produce_queries() const {
    for (int use = 0;; ++use) {
      const auto at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(at);
      const WorkTile work = shared.work[at.stage];
      if (work.tokens == 0) break;
      shared.work_pipeline.release_warp(at.stage);
      copy_queries(work, use);
    }
  }
  FI_DEVICE void copy_queries(const WorkTile& work, int use) const {
    auto& pipeline = shared.q_pipeline;
    const auto at = PipelineState::producer_at<decltype(Shared::q_pipeline)::kStages>(use);
    pipeline.acquire(at);
    if (leads()) {
      Barrier& full = pipeline.expect(at.stage, p.tile_tokens * p.problem.group_size.value * kRowBytes);
      tma_load_tile<kDimQK>(shared.q[at.stage], kRows * 128 / sizeof(T), p.copies.q, full, 0, 0, work.kv_head,
                            work.request.qo_begin + work.token);
    }
    __syncwarp();
  }

  // Copies the keys or the values of every tile, last key tile first. values: whether the page table of V has the
  // pages. NOTE: the barriers of a Pipeline, one array each. Selected by way of the Pipeline, ptxas spills at head_dim
  // 128. kDim: columns of the tile in shared memory, whole 128 bytes.
  template <int kDim, int kStages, class KV>
  FI_DEVICE void produce(const TensorMap& from, KV (&to)[kStages][kKeys * kDim], Barrier (&full)[kStages],
                         Barrier (&empty)[kStages], bool values) const {
    constexpr int kColumns = 128 / sizeof(KV);
    const int boxes = kKeys / p.copies.box_keys, lane = threadIdx.x % 32;
    auto at = PipelineState::producer();
    for_each_tile([&](const Tile& tile) {
      if (tile.count == 0) return;
      int2 next = locate(tile, tile.key(tile.begin + tile.count - 1) + lane * p.copies.box_keys, values);
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j) {
        int2 now = next;
        if (j > tile.begin)
          next = locate(tile, tile.key(j - 1) + lane * p.copies.box_keys, values);  // loads while the stage is acquired
        empty[at.stage].wait(at.phase);
        if (lane == 0) full[at.stage].arrive_expect(kKeys * kDim * sizeof(KV));
        KV* line = to[at.stage];
        for (int first = 0; first < boxes; first += 32) {
          if (first > 0) now = locate(tile, tile.key(j) + (first + lane) * p.copies.box_keys, values);
          const int count = min(32, boxes - first);
          for (int b = 0; b < count; ++b, line += p.copies.box_keys * (kWholeRows ? kDim : kColumns)) {
            const int token = __shfl_sync(0xffffffffu, now.x, b), page = __shfl_sync(0xffffffffu, now.y, b);
            if (lane > 0) continue;
            if constexpr (kWholeRows) {
              tma_load(line, from, full[at.stage], 0, 0,
                       p.copies.heads_in_column_blocks ? tile.kv_head * (kDim / kColumns) : 0,
                       token / 8 + tile.kv_head * p.copies.row_groups_per_head, page);
            } else {
              tma_load_tile<kDim>(line, kKeys * kColumns, from, full[at.stage], 0, token, tile.kv_head, page);
            }
          }
        }
        at.advance(kStages);
      }
    });
  }

  // Copies the keys or the values of every tile by cp.async, last key tile first. By a warp; `full` gets an arrival of
  // each lane. For tiles that plain loads read: wgmma reads through another proxy.
  template <int kDim, int kStages, class KV, int kSize>
  FI_DEVICE void gather(const GatheredRows& from, KV (&to)[kStages][kSize], Barrier (&full)[kStages],
                        Barrier (&empty)[kStages], bool values) const {
    auto at = PipelineState::producer();
    for_each_tile([&](const Tile& tile) {
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j) {
        const Pages<1> pages(*this, tile, j, 0, values);  // they load while the stage is acquired
        empty[at.stage].wait(at.phase);
        gather_tile<kDim>(from, to[at.stage], tile, j, pages);
        full[at.stage].arrive_copies();  // order: thread: every lane arrives for its own copies
        at.advance(kStages);
      }
    });
  }

  // Calls copy(tile, j, step, box) for every KV tile j of every tile, last first. box: what `locate` tells of the box
  // of keys whose number is the lane's. By the one warp that copies both keys and values.
  template <class Copy>
  FI_DEVICE void produce_pairs(Copy&& copy) const {
    const int lane = threadIdx.x % 32;
    unsigned step = 0;  // counts KV tiles of all work tiles
    for_each_tile([&](const Tile& tile) {
      if (tile.count == 0) return;
      int2 next = locate(tile, tile.key(tile.begin + tile.count - 1) + lane * p.copies.box_keys, false);
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j, ++step) {
        const int2 now = next;
        if (j > tile.begin)
          next = locate(tile, tile.key(j - 1) + lane * p.copies.box_keys, false);  // loads while stages are acquired
        copy(tile, j, step, now);
      }
    });
  }
  // Copies keys or values of KV tile j, column blocks kBlockBytes apart. Each lane copies other boxes: a short loop
  // without shuffles.
  template <int kDim, int kBlockBytes, class KV>
  FI_DEVICE void copy_boxes(const TensorMap& from, KV* to, Barrier& full, const Tile& tile, int j, int2 box,
                            bool values) const {
    const int lane = threadIdx.x % 32, boxes = kKeys / p.copies.box_keys;
    if (lane == 0) full.arrive_expect(kKeys * kDim);
    __syncwarp();
    for (int b = lane; b < boxes; b += 32) {
      if (b >= 32 || (kSplitTables && values)) box = locate(tile, tile.key(j) + b * p.copies.box_keys, values);
      tma_load_tile<kDim>(to + b * p.copies.box_keys * 128, kBlockBytes, from, full, 0, box.x, tile.kv_head, box.y);
    }
    __syncwarp();
  }

  // The pages of the rows of a KV tile that one of kWarps warps copies: it takes every kWarps-th group of 8 rows. Lane
  // l has those of its rows l, 32 + l, ... Beyond the last key they are any entries.
  template <int kWarps>
  struct Pages {
    static constexpr int kGroups = (kKeys / 8 + kWarps - 1) / kWarps, kBatches = (kGroups + 3) / 4;
    int ids[kBatches], part;

    FI_DEVICE Pages(const PrefillProducers& producers, const Tile& tile, int j, int part, bool values) : part(part) {
      const BatchPrefillParams& p = producers.p;
      const int table = producers.table(tile, values);
#pragma unroll
      for (int i = 0; i < kBatches; ++i) {
        const int known = min(key(tile, j, i), tile.request.kv_len - 1);
        ids[i] = p.pages.page_indices[table + static_cast<int>(divide(known, p.pages.page_size))];
      }
    }
    FI_DEVICE int group(int i) const { return part + i * kWarps; }
    FI_DEVICE int key(const Tile& tile, int j, int batch) const {
      const unsigned lane = threadIdx.x % 32;
      return group(batch * 4) * 8 + static_cast<int>(lane / 8 * (8 * kWarps) + lane % 8) + uniform(tile.key(j));
    }
  };

  // Starts copies of a KV tile: eight lanes copy 128 bytes of a row. Keys from kv_len on and keys of pages outside of
  // the cache become zeros.
  template <int kDim, class KV, int kWarps>
  FI_DEVICE void gather_tile(const GatheredRows& from, KV* to, const Tile& tile, int j,
                             const Pages<kWarps>& pages) const {
    constexpr int kRowBytes = kDim * sizeof(KV), kBlocks = (kRowBytes + 127) / 128, kStep = kWarps * 8 * 128;
    const int lane = threadIdx.x % 32, row = lane / 8, chunk = lane % 8;
    const int even = swizzled_offset(row, chunk), odd = swizzled_offset(row + 4, chunk);
    const char* head = static_cast<const char*>(from.data) + tile.kv_head * from.head;
    unsigned line = static_cast<unsigned>(__cvta_generic_to_shared(to)) + pages.part * 8 * 128;
#pragma unroll
    for (int i = 0; i < pages.kBatches; ++i) {
      const int key = pages.key(tile, j, i), page = pages.ids[i];
      const bool exists = key < tile.request.kv_len && static_cast<unsigned>(page) <= p.pages.last_page;
      unsigned valid = __ballot_sync(0xffffffffu, exists) >> row;
      const int slot = key - static_cast<int>(divide(key, p.pages.page_size) * p.pages.page_size.value);
      const char* mine = head + (exists ? page * from.page + slot * from.token : 0);
#pragma unroll kRowBytes % 128 == 0 ? 2 : 1
      for (int first = 0; first < min(32, pages.kGroups * 8 - i * 32); first += 8, line += kStep, valid >>= 8) {
        if (kKeys / 8 % kWarps != 0 && pages.group(i * 4 + first / 8) >= kKeys / 8) break;
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
          const char* source = reinterpret_cast<const char*>(
              __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(mine), first + half + row) + chunk * 16);
          const bool inside = valid >> half & 1;
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            cp_async_16(line + (half ? odd : even) + block * kKeys * 128, source + block * 128,
                        inside && (kRowBytes % 128 == 0 || block * 128 + chunk * 16 < kRowBytes));
        }
      }
    }
  }

  // Passes tiles that this warp has copied on to wgmma. All copies of the tile must have landed.
  FI_DEVICE static void pass_on(Barrier& full) {
    fence_async_shared();  // order: writer: as Pipeline::commit_warp; barriers of a Pipeline cost registers (produce)
    __syncwarp();
    if (threadIdx.x % 32 == 0) full.arrive();  // order: lane: behind the fence of every lane
  }
  // Waits for an empty stage. If `copied` (another tile) is not passed on, a wait that blocks passes it on first.
  template <class Ring>
  FI_DEVICE static void acquire(Ring& pipeline, const PipelineState& at, bool& pending, Barrier& copied) {
    if (pending && !uniform(pipeline.empty[at.stage].test_wait(at.phase))) {
      cp_async_wait<0>();
      pass_on(copied);
      pending = false;
    }
    pipeline.acquire(at);
  }
  // This warp's last copies of another tile than `copied` are under way: passes that one on once it has landed.
  FI_DEVICE static void pass_on_previous(bool& pending, Barrier& copied) {
    cp_async_commit();
    if (!pending) return;
    cp_async_wait<1>();
    pass_on(copied);
    pending = false;
  }

  // Calls body(tile) for each work tile of this CTA. By a warp, which copies the tile and then releases it.
  template <class Body>
  FI_DEVICE void for_each_tile(Body&& body) const {
    for (int use = 0;; ++use) {
      const auto at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(at);
      const Tile tile(p, shared.work[at.stage]);
      if (tile.tokens == 0) break;
      shared.work_pipeline.release_warp(at.stage);
      body(tile);
    }
  }

  // Where the page table of a request begins, that of V or of K.
  FI_DEVICE int table(const Tile& tile, bool values) const {
    return tile.request.kv_begin + (kSplitTables && values ? p.pages.v_table_offset : 0);
  }

  // The token in its page and the page of a key. Beyond the last key: any page that exists.
  FI_DEVICE int2 locate(const Tile& tile, int key, bool values) const {
    if (!p.pages.page_indices) return {tile.request.kv_begin + key, 0};
    const int known = min(key, tile.request.kv_len - 1), entry = divide(known, p.pages.page_size);
    const int token = key == known ? key - entry * static_cast<int>(p.pages.page_size.value) : 0;
    return {token, p.pages.page_indices[table(tile, values) + entry]};
  }
};

}  // namespace fi
