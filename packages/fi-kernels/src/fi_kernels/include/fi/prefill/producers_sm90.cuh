// What prefill kernels for Hopper have in common: their entry, a warp that hands out tiles, and warps that copy
// queries, keys, values.
#pragma once
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"
#include "fi/prefill/batch_prefill.h"

namespace fi {

// A tile of query rows: tokens [token, token + tokens) of a request, for one kv head; no tokens: there is no more. Of
// its key tiles this is part number `part` of `parts`; split units are counted by `slot`.
struct Work {
  PrefillRequest request;
  int32_t kv_head, token, tokens, part, parts, slot;
};

// Of a block whose Shared has q, k, v, work, and their barriers. Rows r = token * group + head of the group: a tile
// reads each key once for all heads that share it. Tiles lie in the 128-byte swizzle, [dim / kColumns][rows][kColumns],
// or keys and values [rows / 8][dim / kColumns][8][kColumns] where copies bring whole rows.
template <class Shared, class T, int kDimQK, int kKeys, bool kWholeRows>
struct PrefillProducers {
  static constexpr int kRows = sizeof(Shared::q[0]) / (kDimQK * sizeof(T));

  // What all roles derive from a unit of work.
  struct Tile : Work {
    Mask mask;
    int begin, count;  // of the key tiles

    FI_DEVICE Tile(const BatchPrefillParams& p, const Work& work) : Work(work) {
      mask = Mask::of_range(p.causal, p.window_left, request.qo_len, request.kv_len);
      begin = mask.first_key(token) / kKeys;
      count = (mask.end_key(token + tokens - 1) + kKeys - 1) / kKeys - begin;
      if (parts > 1) {
        const int before = count * part / parts;
        begin += before;
        count = count * (part + 1) / parts - before;
      }
    }
  };

  const BatchPrefillParams& p;
  Shared& shared;

  // What blocks take under the number `index`: a unit of work, or a part of one; with part == parts nothing.
  FI_DEVICE Work work(int index, const PrefillHeader& plan) const {
    const int more = index - plan.whole, split = more < 0 ? 1 : plan.parts;
    const int unit = split > 1 ? plan.whole + more / split : index;
    if (unit >= plan.items * p.kv_heads) return {{0, 0, 0, 0}, 0, 0, 0, 0, 1, 0};
    const int section = unit / (plan.items * p.section), rest = unit - section * plan.items * p.section;
    const int heads = min(p.section, p.kv_heads - section * p.section), item = rest / heads;
    const PrefillItem found = p.schedule.items[item];
    const PrefillRequest request = p.schedule.requests[found.request];
    const int token = found.tile * plan.tile_tokens, tokens = min(plan.tile_tokens, request.qo_len - token);
    Work work{request, section * p.section + rest - item * heads, token, tokens, 0, 1, 0};
    if (split > 1) {
      work.slot = unit - plan.whole;
      work.parts = min(split, max(1, (Tile(p, work).count + plan.part_keys - 1) / plan.part_keys));
      work.part = min(more - work.slot * split, work.parts);
    }
    return work;
  }

  // By a warp: hands out units of work, and with kQueries copies the queries of each; then zeros rows of no request.
  template <bool kQueries>
  FI_DEVICE void schedule() const {
    if (threadIdx.x % 32 == 0) hand_out<kQueries>();
    __syncwarp();
    const PrefillRest rest = PrefillRest::of(p.rest_rows, p.batch, p.schedule.requests);
    for (int i = blockIdx.x; i < rest.count(); i += gridDim.x)
      for (int head = 0; head < p.qo_heads; ++head) {
        uint16_t* row = static_cast<uint16_t*>(p.out) + rest.row(i) * p.out_token + head * p.out_head;
        for (int j = threadIdx.x % 32 * 8; j < p.dim_vo; j += 256) store_global(row + j, uint4{0, 0, 0, 0});
      }
  }
  // One ahead of its use, and no more: who holds many when few are left has others wait for him. H200: one sequence of
  // 16k 3147 -> 3102 us, four of 4k and 128 heads of 192 4344 -> 4279.
  template <bool kQueries>
  FI_DEVICE void hand_out() const {
    const PrefillHeader plan = *p.schedule.header;
    const int blocks = gridDim.x;
    int index = blockIdx.x;
    for (int use = 0;;) {
      Work now;
      for (;; index = take(blocks)) {
        now = work(index, plan);
        if (now.part < now.parts) break;
      }
      shared.work[use % 2] = now;
      shared.work_full[use % 2].arrive();
      if (now.tokens == 0) break;
      if (kQueries) copy_queries(now, use);
      ++use;
      shared.work_empty[use % 2].wait(use / 2 % 2 ^ 1);
      index = take(blocks);
    }
    if (atomicAdd(&p.schedule.header->done, 1) == blocks - 1) p.schedule.header->next = p.schedule.header->done = 0;
  }
  FI_DEVICE int take(int blocks) const { return atomicAdd(&p.schedule.header->next, 1) + blocks; }

  // Copies the queries of every tile.
  FI_DEVICE void produce_queries() const {
    for (int use = 0;; ++use) {
      shared.work_full[use % 2].wait(use / 2 % 2);
      const Work work = shared.work[use % 2];
      if (work.tokens == 0) break;
      shared.work_empty[use % 2].arrive();
      copy_queries(work, use);
    }
  }
  FI_DEVICE void copy_queries(const Work& work, int use) const {
    constexpr int kStages = sizeof(shared.q) / sizeof(shared.q[0]), kColumns = 128 / sizeof(T);
    const int stage = use % kStages;
    shared.q_empty[stage].wait(use / kStages % 2 ^ 1);
    shared.q_full[stage].arrive_expect(p.tile_tokens * p.group.value * kDimQK * sizeof(T));
    for (int block = 0; block < kDimQK / kColumns; ++block)
      tma_load(shared.q[stage] + block * kRows * kColumns, p.q, shared.q_full[stage], block * kColumns, 0, work.kv_head,
               work.request.qo_begin + work.token);
  }

  // Copies the keys or the values of every tile, last key tile first.
  template <int kDim, int kStages, class KV>
  FI_DEVICE void produce(const TensorMap& from, KV (&to)[kStages][kKeys * kDim], Barrier (&full)[kStages],
                         Barrier (&empty)[kStages]) const {
    constexpr int kColumns = 128 / sizeof(KV);
    const int boxes = kKeys / p.box, lane = threadIdx.x % 32;
    int stage = 0, parity = 1;
    for (int use = 0;; ++use) {
      shared.work_full[use % 2].wait(use / 2 % 2);
      const Tile tile(p, shared.work[use % 2]);
      if (tile.tokens == 0) break;
      __syncwarp();
      if (lane == 0) shared.work_empty[use % 2].arrive();
      if (tile.count == 0) continue;
      int2 next = place(tile, (tile.begin + tile.count - 1) * kKeys + lane * p.box);
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j) {
        int2 now = next;
        if (j > tile.begin) next = place(tile, (j - 1) * kKeys + lane * p.box);  // arrives during the wait
        empty[stage].wait(parity);
        if (lane == 0) full[stage].arrive_expect(kKeys * kDim * sizeof(KV));
        KV* line = to[stage];
        for (int first = 0; first < boxes; first += 32) {
          if (first > 0) now = place(tile, j * kKeys + (first + lane) * p.box);
          const int count = min(32, boxes - first);
          for (int b = 0; b < count; ++b, line += p.box * (kWholeRows ? kDim : kColumns)) {
            const int token = __shfl_sync(0xffffffffu, now.x, b), page = __shfl_sync(0xffffffffu, now.y, b);
            if (lane > 0) continue;
            if constexpr (kWholeRows) {
              tma_load(line, from, full[stage], 0, 0, p.heads_in_blocks ? tile.kv_head * (kDim / kColumns) : 0,
                       token / 8 + tile.kv_head * p.head_groups, page);
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
    if (!p.pages) return {tile.request.kv_begin + key, 0};
    const int known = min(key, tile.request.kv_len - 1), entry = divide(known, p.page_size);
    const int token = key == known ? key - entry * static_cast<int>(p.page_size.value) : 0;
    return {token, p.pages[tile.request.kv_begin + entry]};
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
