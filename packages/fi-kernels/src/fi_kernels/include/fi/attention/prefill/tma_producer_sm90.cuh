// The producer warps of the Hopper prefill kernels: a tile scheduler warp, and TMA producers of Q, K and V.
#pragma once
#include "fi/attention/prefill/batch_prefill.h"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"

namespace fi {

// A tile of query rows: tokens [token, token + tokens) of a request, for one kv head; no tokens: there is no more. Of
// its key tiles this is part number `part` of `parts`; split units are counted by `slot`.
struct WorkTile {
  PrefillRequest request;
  int32_t kv_head, token, tokens, split_idx, num_splits, split_tile;
};

// Of a block whose Shared has q, k, v, work, and their barriers. Rows r = token * group + head of the group: a tile
// reads each key once for all heads that share it. Tiles lie in the 128-byte swizzle, [dim / kColumns][rows][kColumns],
// or keys and values [rows / 8][dim / kColumns][8][kColumns] where copies bring whole rows.
template <class Shared, class T, int kDimQK, int kKeys, bool kWholeRows>
struct PrefillProducers {
  static constexpr int kRows = sizeof(Shared::q[0]) / (kDimQK * sizeof(T));

  // What all roles derive from a unit of work.
  struct Tile : WorkTile {
    Mask mask;
    int begin, count;  // of the key tiles

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

  // What blocks take under the number `index`: a unit of work, or a part of one; with part == parts nothing.
  FI_DEVICE WorkTile work(int index, const PrefillHeader& plan) const {
    const int more = index - plan.first_split, split = more < 0 ? 1 : plan.max_splits;
    const int unit = split > 1 ? plan.first_split + more / split : index;
    if (unit >= plan.num_tiles * p.kv_heads) return {{0, 0, 0, 0}, 0, 0, 0, 0, 1, 0};
    const int section = unit / (plan.num_tiles * p.l2_kv_heads), rest = unit - section * plan.num_tiles * p.l2_kv_heads;
    const int heads = min(p.l2_kv_heads, p.kv_heads - section * p.l2_kv_heads), item = rest / heads;
    const PrefillWorkTile found = p.schedule.tiles[item];
    const PrefillRequest request = p.schedule.requests[found.request];
    const int token = found.q_tile * plan.tile_tokens, tokens = min(plan.tile_tokens, request.qo_len - token);
    WorkTile work{request, section * p.l2_kv_heads + rest - item * heads, token, tokens, 0, 1, 0};
    if (split > 1) {
      work.split_tile = unit - plan.first_split;
      work.num_splits = min(split, max(1, (Tile(p, work).count + plan.min_split_tiles - 1) / plan.min_split_tiles));
      work.split_idx = min(more - work.split_tile * split, work.num_splits);
    }
    return work;
  }

  // The tile scheduler warp: publishes work tiles, with kQueries also copies the queries of each, then zeros padding
  // rows.
  template <bool kQueries>
  FI_DEVICE void schedule() const {
    if (threadIdx.x % 32 == 0) hand_out<kQueries>();
    __syncwarp();
    clear_rest();
  }
  // Zeros rows of no request.
  FI_DEVICE void clear_rest() const {
    const PaddingRows rest = PaddingRows::of(p.padded_rows, p.batch, p.schedule.requests);
    const int bytes = out_bytes(p.out_type), count = rest.count() * p.qo_heads;
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
      const int row = i / p.qo_heads, head = i - row * p.qo_heads;
      char* out = static_cast<char*>(p.out) + (rest.row(row) * p.out_token + head * p.out_head) * bytes;
      for (int j = threadIdx.x % 32 * 16; j < p.head_dim_vo * bytes; j += 512) store_global(out + j, uint4{0, 0, 0, 0});
    }
  }
  // A CTA takes one work tile ahead, no more: tiles that it holds late in the kernel leave other CTAs idle. H200: one
  // sequence of 16k 3147 -> 3102 us, four of 4k and 128 heads of 192 4344 -> 4279.
  template <bool kQueries>
  FI_DEVICE void hand_out() const {
    const PrefillHeader plan = *p.schedule.header;
    const int blocks = gridDim.x;
    int index = blockIdx.x;
    for (int use = 0;;) {
      WorkTile now;
      for (;; index = take(blocks)) {
        now = work(index, plan);
        if (now.split_idx < now.num_splits) break;
      }
      shared.work[use % 2] = now;
      shared.work_full[use % 2].arrive();
      if (now.tokens == 0) break;
      if (kQueries) copy_queries(now, use);
      ++use;
      shared.work_empty[use % 2].wait(use / 2 % 2 ^ 1);
      index = take(blocks);
    }
    if (atomicAdd(&p.schedule.header->ctas_done, 1) == blocks - 1)
      p.schedule.header->next_work = p.schedule.header->ctas_done = 0;
  }
  FI_DEVICE int take(int blocks) const { return atomicAdd(&p.schedule.header->next_work, 1) + blocks; }

  // Copies the queries of every tile.
  FI_DEVICE void produce_queries() const {
    for (int use = 0;; ++use) {
      shared.work_full[use % 2].wait(use / 2 % 2);
      const WorkTile work = shared.work[use % 2];
      if (work.tokens == 0) break;
      shared.work_empty[use % 2].arrive();
      copy_queries(work, use);
    }
  }
  FI_DEVICE void copy_queries(const WorkTile& work, int use) const {
    constexpr int kStages = sizeof(shared.q) / sizeof(shared.q[0]), kColumns = 128 / sizeof(T);
    const int stage = use % kStages;
    shared.q_empty[stage].wait(use / kStages % 2 ^ 1);
    shared.q_full[stage].arrive_expect(p.tile_tokens * p.group_size.value * kDimQK * sizeof(T));
    for (int block = 0; block < kDimQK / kColumns; ++block)
      tma_load(shared.q[stage] + block * kRows * kColumns, p.q, shared.q_full[stage], block * kColumns, 0, work.kv_head,
               work.request.qo_begin + work.token);
  }

  // Copies the keys or the values of every tile, last key tile first.
  template <int kDim, int kStages, class KV>
  FI_DEVICE void produce(const TensorMap& from, KV (&to)[kStages][kKeys * kDim], Barrier (&full)[kStages],
                         Barrier (&empty)[kStages]) const {
    constexpr int kColumns = 128 / sizeof(KV);
    const int boxes = kKeys / p.box_keys, lane = threadIdx.x % 32;
    int stage = 0, parity = 1;
    for (int use = 0;; ++use) {
      shared.work_full[use % 2].wait(use / 2 % 2);
      const Tile tile(p, shared.work[use % 2]);
      if (tile.tokens == 0) break;
      __syncwarp();
      if (lane == 0) shared.work_empty[use % 2].arrive();
      if (tile.count == 0) continue;
      int2 next = place(tile, (tile.begin + tile.count - 1) * kKeys + lane * p.box_keys);
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j) {
        int2 now = next;
        if (j > tile.begin) next = place(tile, (j - 1) * kKeys + lane * p.box_keys);  // arrives during the wait
        empty[stage].wait(parity);
        if (lane == 0) full[stage].arrive_expect(kKeys * kDim * sizeof(KV));
        KV* line = to[stage];
        for (int first = 0; first < boxes; first += 32) {
          if (first > 0) now = place(tile, j * kKeys + (first + lane) * p.box_keys);
          const int count = min(32, boxes - first);
          for (int b = 0; b < count; ++b, line += p.box_keys * (kWholeRows ? kDim : kColumns)) {
            const int token = __shfl_sync(0xffffffffu, now.x, b), page = __shfl_sync(0xffffffffu, now.y, b);
            if (lane > 0) continue;
            if constexpr (kWholeRows) {
              tma_load(line, from, full[stage], 0, 0, p.heads_in_column_blocks ? tile.kv_head * (kDim / kColumns) : 0,
                       token / 8 + tile.kv_head * p.row_groups_per_head, page);
            } else {
#pragma unroll
              for (int block = 0; block < kDim / kColumns; ++block)
                tma_load(line + block * kKeys * kColumns, from, full[stage], block * kColumns, token, tile.kv_head,
                         page);
            }
          }
        }
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
  }

  // Where a key lies: token of a page, page. Beyond the last key it may be any that exists.
  FI_DEVICE int2 place(const Tile& tile, int key) const {
    if (!p.page_indices) return {tile.request.kv_begin + key, 0};
    const int known = min(key, tile.request.kv_len - 1), entry = divide(known, p.page_size);
    const int token = key == known ? key - entry * static_cast<int>(p.page_size.value) : 0;
    return {token, p.page_indices[tile.request.kv_begin + entry]};
  }
};

// The same in all lanes, and known to be: wgmma behind a branch on it need not be serialised.
FI_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// A kernel with its shared memory, which begins at a multiple of 1024 bytes.
template <class Kernel, int kSharedBytes>
FI_DEVICE void run_aligned(const BatchPrefillParams& params) {
  extern __shared__ uint4 bytes[];
  static_assert(sizeof(typename Kernel::Shared) + 1024 <= kSharedBytes, "the family's Python says how much to ask for");
  // NOTE: an offset; of a pointer made of an integer the compiler does not know that it points to shared memory.
  const unsigned offset = -static_cast<unsigned>(__cvta_generic_to_shared(bytes)) % 1024;
  Kernel{params, *reinterpret_cast<typename Kernel::Shared*>(reinterpret_cast<char*>(bytes) + offset)}.run();
}

}  // namespace fi
