// Batch decode on Hopper: a persistent warp-specialised CTA. Two producer warps fill a ring of K and V stages by TMA,
// consumer warps multiply 16 or 32 keys of each stage on tensor cores, and an epilogue warp finishes a work tile while
// the consumers process the next.
#pragma once
#include "fi/attention/decode/bulk_merge_sm90.cuh"
#include "fi/attention/decode/cluster_sm90.cuh"
#include "fi/attention/decode/dynamic_ranges.cuh"
#include "fi/attention/decode/warp_mma_tile.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/tma_sm90.cuh"

namespace fi {

// kWarps consume; each takes kWarpKeys of a stage. Of kStages in the ring kLong are used where ranges are long.
template <class T, class Q, class KV, int kDim, int kWarps, int kWarpKeys, int kStages, int kLong, bool kWhole>
struct DecodeTmaKernel {
  static constexpr int kThreads = kWarps * 32;      // of the consumers
  static constexpr int kKeys = kWarps * kWarpKeys;  // of a stage
  static constexpr int kLines = (kDim * sizeof(KV) + 127) / 128;
  static constexpr int kOutputPitch = kDim + 8;
  static constexpr int kSegments = 4;  // that are described at a time
  static constexpr int kRanges = 2;    // that V's warp is ahead of K's
  static constexpr int kAhead = 4;     // stages before the end of a range its successor is looked up
  // Parts that one block reads; H200, 33 parts: of b1 kv8k 8/1 17.4 us, in groups 19.5.
  static constexpr int kDirect = 40;
  // Tiles of a range for which all of the ring is used; H200, b1 kv8k 21.1 us, without 21.6.
  static constexpr int kShort = 12;
  using Lines = SwizzledKvTile<kLines, kKeys>;
  using Tile = WarpMmaTile<T, Q, KV, kDim, Lines, kWarpKeys>;

  struct Shared {
    char k[kStages][Lines::kBytes], v[kStages][Lines::kBytes];
    float output[kWarps][kDecodeQTile][kOutputPitch];
    Q queries[kSegments][kDecodeQTile][Tile::kPitch];
    float2 states[kWarps][kDecodeQTile];
    DecodeWorkTile segments[kSegments];
    Barrier full_k[kStages], full_v[kStages], empty[kStages];  // of the ring
    Barrier ready[kSegments], free[kSegments];                 // of segments and queries
    Barrier output_full, output_free, parts_full;
    Barrier range_full[kRanges], range_free[kRanges];
    int ranges[kRanges];
    int last[2], stages;
    float bmm1;
  };

  const BatchDecodeParams& params;
  Shared& shared;
  const int lane;

  FI_DEVICE DecodeTmaKernel(const BatchDecodeParams& params, Shared& shared)
      : params(params), shared(shared), lane(threadIdx.x % 32) {}

  FI_DEVICE void init() const {
    for (int i = 0; i < kStages; ++i) shared.full_k[i].init(1), shared.full_v[i].init(1), shared.empty[i].init(kWarps);
    for (int i = 0; i < kSegments; ++i) shared.ready[i].init(33), shared.free[i].init(kThreads + 32);
    shared.output_full.init(kThreads);
    shared.output_free.init(32);
    shared.parts_full.init(1);
    for (int i = 0; i < kRanges; ++i) shared.range_full[i].init(1), shared.range_free[i].init(32);
    fence_barrier_init();
    prefetch_tensor_map(params.k_map);
    prefetch_tensor_map(params.v_map);
  }

  // Keys [low, high) of a segment are read.
  FI_DEVICE int low(const DecodeWorkTile& s) const {
    Mask mask = params.problem.mask;
    mask.kv_len = s.kv_len;
    return max(s.begin * kDecodeKvTile, mask.first_key(0));
  }
  FI_DEVICE int high(const DecodeWorkTile& s) const { return params.end_key(s); }

  // The producer's view of a segment: boxes of 2^box_keys_log2 keys, counted from its first key. Lane l holds page and
  // slot of boxes l, 32 + l, ...; those of the next 32 are read while the present ones are used.
  struct Boxes {
    DecodeWorkTile s;
    int low, high, page, slot, next_page, next_slot;
  };
  FI_DEVICE void look_up(const Boxes& b, int window, int& page, int& slot) const {
    const int64_t key =
        static_cast<int64_t>(b.s.begin) * kDecodeKvTile + ((window * 32 + lane) << params.box_keys_log2);
    page = slot = 0;
    if (key >= b.high || key + (1 << params.box_keys_log2) <= b.low) return;
    const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.page_size));
    page = params.page_indices[b.s.first_page + index];
    slot = static_cast<int>(key) - index * static_cast<int>(params.page_size.value);
  }
  // The later ranges, which the values' warp takes and tells the keys' warp.
  struct Ranges {
    bool values, asked;
    int count, range;  // range: of the values' first lane, once it has asked
  };
  // Some time before the range is wanted: the answer takes a microsecond.
  FI_DEVICE void ask(const DecodeTileScheduler& walk, Ranges& ranges) const {
    if (!ranges.values || ranges.asked) return;
    if (lane == 0) ranges.range = next_dynamic_range(params, walk.header);
    ranges.asked = true;
  }
  FI_DEVICE bool enter(DecodeTileScheduler& walk, Ranges& ranges) const {
    if (walk.header.dynamic_ranges == 0) return false;
    const int at = ranges.count % kRanges, parity = ranges.count / kRanges & 1;
    int range;
    if (ranges.values) {
      ask(walk, ranges);
      range = __shfl_sync(0xffffffffu, ranges.range, 0);
      shared.range_free[at].wait(parity ^ 1);
      if (lane == 0) shared.ranges[at] = range, shared.range_full[at].arrive();
    } else {
      shared.range_full[at].wait(parity);
      range = shared.ranges[at];
      shared.range_free[at].arrive();
    }
    ++ranges.count, ranges.asked = false;
    walk.enter(range);
    return range >= 0;
  }

  // After the last segment comes one of q_tile -1, which has no keys.
  FI_DEVICE void next(DecodeTileScheduler& walk, Ranges& ranges, Boxes& b) const {
    while (!walk.next(b.s)) {
      if (enter(walk, ranges)) continue;
      b.s.q_tile = -1, b.s.begin = b.low = b.high = 0;
      return;
    }
    b.low = low(b.s), b.high = high(b.s);
    look_up(b, 0, b.page, b.slot);
    look_up(b, 1, b.next_page, b.next_slot);
  }

  // By one warp for the keys and one for the values and the queries.
  FI_DEVICE void produce(bool values, DecodeTileScheduler& walk) const {
    const uint64_t policy = walk.header.cost < params.evict_first_tiles ? kEvictFirst : kEvictNormal;
    Boxes now, then;
    then.s.q_tile = then.s.begin = then.low = then.high = 0;  // a segment without keys, before the first: code that is
    int stage = 0;                                            // read once instead of twice
    const int stages = walk.header.cost < params.num_ctas * kShort ? kStages : kLong;
    if (lane == 0 && values) shared.stages = stages;
    Ranges ranges{values, false, 0, -1};
    unsigned round = 0;
#pragma unroll 1
    for (int count = -1;; ++count) {
      now = then;
      if (now.s.q_tile < 0) break;
      // The next segment of the range is looked up when the first keys are on their way, the next range near its end.
      bool looked_up = false;
      feed(now, values, policy, stages, stage, round, [&](int keys_left) {
        if (looked_up) return;
        if (walk.done() && keys_left > kAhead * kKeys) {
          if (keys_left <= 2 * kAhead * kKeys) ask(walk, ranges);
          return;
        }
        looked_up = true;
        next(walk, ranges, then);
        if (values) describe(then.s, count + 1);  // long before its keys: queries arrive behind all that was asked for
      });
    }
    pdl_launch_dependents();
  }

  // Tells the consumers of a segment, and reads its queries.
  FI_DEVICE void describe(const DecodeWorkTile& s, int count) const {
    const int at = count % kSegments;
    if (count >= kSegments) shared.free[at].wait((count / kSegments - 1) & 1);
    if (s.q_tile >= 0) {
      constexpr int kPieces = kDim * sizeof(Q) / 16;
      const AttentionProblem& p = params.problem;
      const DecodeEpilogue tile(params, s, kDim);
#pragma unroll 1
      for (int i = lane; i < tile.rows * kPieces; i += 32) {  // a bulk copy a row would take a hundred cycles each
        const int r = i / kPieces, piece = i % kPieces * 16;
        const Row row = params.row(tile.kv_head, tile.first + r);
        const int64_t token = params.first_token(s.request) + row.i;
        const Q* from = static_cast<const Q*>(p.q) + token * p.q_token + row.head * p.q_head;
        cp_async_16(reinterpret_cast<char*>(shared.queries[at][r]) + piece,
                    reinterpret_cast<const char*>(from) + piece);
      }
    }
    shared.ready[at].arrive_copies();
    if (lane == 0) shared.segments[at] = s, shared.ready[at].arrive();
  }

  // Calls `then` with the number of keys that are not on their way yet, after each stage; once if there are no keys.
  template <class Then>
  FI_DEVICE void feed(Boxes& b, bool values, uint64_t policy, int stages, int& stage, unsigned& round,
                      Then&& then) const {
    const int shift = params.box_keys_log2, boxes = kKeys >> shift, head = params.kv_head(b.s.q_tile);
    const TensorMap& map = values ? params.v_map : params.k_map;
    char* const ring = values ? shared.v[0] : shared.k[0];
    Barrier* const full = values ? shared.full_v : shared.full_k;
    int first_box = 0;  // of the stage, in the segment
#pragma unroll 1
    for (int key = b.s.begin * kDecodeKvTile; key < b.high || first_box == 0; key += kKeys, first_box += boxes) {
      if (key < b.high) {
        shared.empty[stage].wait((round & 1) ^ 1);
        const int to = (min(b.high - key, kKeys) + (1 << shift) - 1) >> shift;
        const int from = min(max(b.low - key, 0) >> shift, to);  // a stage of half a tile may lie before all keys
        if (lane == 0) full[stage].arrive_expect((to - from) * (kLines * 128 << shift));
        __syncwarp();
#pragma unroll 1
        for (int done = 0; done < boxes;) {
          const int place = (first_box + done) % 32;  // in the window
          const int box = done + lane - place;
          const int these = min(boxes - done, 32 - place);
          if (lane >= place && lane < place + these && box >= from && box < to)
            copy(ring + stage * Lines::kBytes, map, full[stage], box << shift, b.slot, head, b.page, policy);
          done += these;
          if (place + these == 32) {
            b.page = b.next_page, b.slot = b.next_slot;
            look_up(b, (first_box + done) / 32 + 1, b.next_page, b.next_slot);
          }
        }
        if (++stage == stages) stage = 0, ++round;
      }
      then(b.high - key - kKeys);
    }
  }

  // By one lane: key is the first one's place in the stage.
  FI_DEVICE void copy(char* to, const TensorMap& map, Barrier& barrier, int key, int slot, int head, int page,
                      uint64_t policy) const {
    constexpr int kCopies = kWhole ? 1 : kLines;
#pragma unroll
    for (int line = 0; line < kCopies; ++line)
      tma_load(to + (key * kLines + (line << params.box_keys_log2)) * 128, map, barrier,
               line * 128 / static_cast<int>(sizeof(KV)), slot, 0, head, page, policy);
  }

  FI_DEVICE void consume() const {
    const int warp = threadIdx.x / 32, slice = warp * kWarpKeys;
    Tile tile({params.box_keys_log2}, slice);
    int stage = 0;
    unsigned round = 0;
#pragma unroll 1
    for (int count = 0;; ++count) {
      const int at = count % kSegments;
      shared.ready[at].wait(count / kSegments & 1);
      const DecodeWorkTile& s = shared.segments[at];
      if (s.q_tile < 0) break;
      const auto problem = [&] { return params.keys_of(s.request, s.kv_len, shared.bmm1); };
      {
        const DecodeEpilogue tile_of(params, s, kDim);
        tile.begin(params, problem(), tile_of.kv_head, tile_of.first, tile_of.rows, shared.queries[at][0]);
      }
      const int from = low(s), to = high(s);
#pragma unroll 1
      for (int tile_key = s.begin * kDecodeKvTile; tile_key < to; tile_key += kKeys) {
        const int key = tile_key + slice;
        shared.full_k[stage].wait(round & 1);
        const auto values = [&] { shared.full_v[stage].wait(round & 1); };
        if (tile.plain(key, from, to))
          tile.template attend<true>(problem, shared.queries[at][0], shared.k[stage], shared.v[stage], key, from, to,
                                     values);
        else if (key < to && key + kWarpKeys > from)
          tile.template attend<false>(problem, shared.queries[at][0], shared.k[stage], shared.v[stage], key, from, to,
                                      values);
        __syncwarp();
        if (lane == 0) shared.empty[stage].arrive();
        if (++stage == shared.stages) stage = 0, ++round;
      }
      const DecodeEpilogue finish(params, s, kDim);
      const bool last = is_last(count);
      if (count > 0) shared.output_free.wait((count - 1) & 1);
      tile.leave(finish.rows, shared.output[warp][0], kOutputPitch, shared.states[warp]);
      if (last) {
        barrier_sync(1, kThreads);
        BulkEpilogueThreads<kDirect, kThreads> team(threadIdx.x, 1, &shared.last[0], shared.parts_full,
                                                    shared.states[0], shared.k[0],
                                                    sizeof shared.k + sizeof shared.v);  // the ring is free
        complete(finish, team, [] {});
        return;
      }
      shared.output_full.arrive();
      shared.free[at].arrive();
    }
  }

  // Whether segment `count` is the last: waits until the next is described.
  FI_DEVICE bool is_last(int count) const {
    const int next = count + 1;
    shared.ready[next % kSegments].wait(next / kSegments & 1);
    return shared.segments[next % kSegments].q_tile < 0;
  }

  // Page ids and queries are read one after the other, each by way of what was read before. All blocks together bring
  // them into L2 meanwhile.
  FI_DEVICE void prefetch() const {
    prefetch(params.page_indices, params.index_bytes);
    prefetch(params.problem.q, params.query_bytes);
  }
  FI_DEVICE void prefetch(const void* from, int64_t bytes) const {
    const int64_t line = blockIdx.x + static_cast<int64_t>(lane) * params.num_ctas;
    if (bytes <= params.num_ctas * 32 * 128 && line * 128 < bytes)
      prefetch_l2(static_cast<const char*>(from) + line * 128);
  }

  // All segments but the last, which the consumers finish themselves, being more.
  FI_DEVICE void follow() const {
#pragma unroll 1
    for (int count = 0;; ++count) {
      const int at = count % kSegments;
      shared.ready[at].wait(count / kSegments & 1);
      const DecodeWorkTile& s = shared.segments[at];
      if (s.q_tile < 0 || is_last(count)) return;
      shared.output_full.wait(count & 1);
      EpilogueThreads<kDirect> team{lane, 32, 2, &shared.last[1]};
      complete(DecodeEpilogue(params, s, kDim), team, [&] { shared.output_free.arrive(); });
      shared.free[at].arrive();
    }
  }

  template <class Team, class Released>
  FI_DEVICE void complete(const DecodeEpilogue& finish, Team& team, Released&& released) const {
    finish.finish(
        team,
        [&](int r, int x) {
          return DecodeEpilogue::merged_warps<kWarps>([&](int w) { return shared.states[w][r]; },
                                                      [&](int w) { return &shared.output[w][r][x]; });
        },
        released, [&](int r, int x, const PartialOutput& values) { finish.write(r, x, values); });
  }
};

// Grid: the blocks of the schedule; threads: the consumers, the two producers, the finisher.
template <class T, class Q, class KV, int kDim, int kWarps, int kWarpKeys, int kStages, int kLong, bool kWhole,
          int kSharedBytes>
FI_DEVICE void decode_tma(const BatchDecodeParams& params) {
  extern __shared__ uint4 bytes[];
  using Kernel = DecodeTmaKernel<T, Q, KV, kDim, kWarps, kWarpKeys, kStages, kLong, kWhole>;
  static_assert(sizeof(typename Kernel::Shared) + 1024 == kSharedBytes, "the family's Python says how much to ask for");
  // The swizzle goes by the address: lines begin at multiples of its period.
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(bytes));
  Kernel kernel(params, *reinterpret_cast<typename Kernel::Shared*>(reinterpret_cast<char*>(bytes) +
                                                                    (1024 - base % 1024) % 1024));
  if (threadIdx.x == 0) kernel.init();
  pdl_wait();
  if (threadIdx.x >= Kernel::kThreads + 64) kernel.prefetch();
  if (threadIdx.x == 0) kernel.shared.bmm1 = params.bmm1_scale ? *params.bmm1_scale : 1.f;
  const int role = static_cast<int>(threadIdx.x) - Kernel::kThreads;
  DecodeTileScheduler walk;
  if (role >= 0 && role < 64)
    walk.begin(params.view(), blockIdx.x, params.problem.mask.qo_len, params.problem.mask.window_left);
  __syncthreads();
  if (role < 0)
    kernel.consume();
  else if (role < 64)
    kernel.produce(role >= 32, walk);
  else
    kernel.follow();
}

}  // namespace fi
