// Batch decode on Hopper: a persistent warp-specialised CTA. Two producer warps fill a ring of K and V stages by TMA,
// consumer warps multiply 16 or 32 keys of each stage on tensor cores, and an epilogue warp finishes a work tile while
// the consumers process the next. With NVFP4 a third producer warp copies the scales.
#pragma once
#include "fi/attention/decode/bulk_merge_sm90.cuh"
#include "fi/attention/decode/cluster_sm90.cuh"
#include "fi/attention/decode/dynamic_scheduler.cuh"
#include "fi/attention/decode/scale_stages.cuh"
#include "fi/attention/decode/warp_fp4_tile.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/tma_tile_sm90.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

// kWarps consumer warps in kGroups groups, which take alternate stages; each warp of a group processes kWarpKeys of
// a stage. Long work ranges use kLong of the kStages stages. kRows: the most rows of a q tile, or of a kv head of it. A
// q tile has kHeads kv heads, and a stage the keys of all: each warp processes those of one head.
template <class T, class Q, class KV, int kDim, int kWarps, int kWarpKeys, int kStages, int kLong, bool kWhole,
          int kGroups = 1, int kRows = kDecodeQTile, int kHeads = 1>
struct DecodeTmaKernel {
  static constexpr int kThreads = kWarps * 32;  // of the consumers
  static constexpr int kGroupWarps = kWarps / kGroups;
  static constexpr int kStageKeys = kGroupWarps * kWarpKeys;
  static constexpr int kKeys = kStageKeys / kHeads;        // tokens of a stage
  static constexpr int kHeadWarps = kGroupWarps / kHeads;  // warps of a group that process the same head
  static constexpr bool kFp4 = kIsE2m1<KV>;
  static_assert(kGroupWarps % kHeads == 0 && (kFp4 || kHeads == 1));
  static constexpr int kOutputPitch = kDim + 8;
  static constexpr int kWorkStages = 4;   // work tiles published at a time
  static constexpr int kRangeStages = 2;  // dynamic ranges that V's warp is ahead of K's
  static constexpr int kLookAhead = 4;    // stages before the end of a range at which the next range is requested
  // The most splits that one CTA merges; more are merged in groups (docs/notes/decode-merge.md).
  static constexpr int kDirect = 40;
  // Ranges of fewer KV tiles use all stages (docs/notes/decode-mainloop.md).
  static constexpr int kShortRange = 12;
  using KvTile = typename KvTileOf<KV, kDim, kStageKeys, true, kHeads>::Type;
  using Tile = typename DecodeTileOf<T, Q, KV, kDim, KvTile, kWarpKeys, kRows>::Type;
  using Scales = ScaleStages<KV, kDim, kStageKeys, kStages>;
  static constexpr int kKeyBytes = KvTile::kBytes / kStageKeys;
  static constexpr int kTileRows = kHeads > 1 ? kDecodeQTile : kRows;
  static constexpr int kTokenBytes = kHeads * (kFp4 ? 2 : 1) * kKeyBytes;  // of a token in a stage of the ring
  static constexpr int kScaleThreads = kFp4 ? 32 : 0;                      // which arrive for each stage
  // With eight consumer warps each needs more than an equal share.
  static constexpr bool kMovesRegisters = kWarps > 4;
  static constexpr int kProducerRegisters = 104, kConsumerRegisters = kWarps > 8 ? 136 : 200;
  static_assert(!kMovesRegisters ||
                registers_fit(kWarps / 4 * kConsumerRegisters + kProducerRegisters, kWarps / 4 + 1));

  struct Tiles {
    char kv[2][kStages][KvTile::kBytes];  // keys, then values; of NVFP4 stages of both
    float output[kWarps][kRows][kOutputPitch];
    Q queries[kWorkStages][kTileRows][Tile::kPitch];
    float2 states[kWarps][kRows];
    DecodeWorkTile work_tiles[kWorkStages];
    // K arrives before V; the stages of both are freed together. NVFP4 has no use for it: K and V arrive at once.
    Barrier k_full[kStages];
    Pipeline<kStages, Writer::kCopies, Reader::kLoads> kv_pipeline;  // full: V has arrived
    Pipeline<kWorkStages, Writer::kThreads, Reader::kLoads> work_pipeline;
    Pipeline<1, Writer::kThreads, Reader::kLoads> output_pipeline;
    Barrier partials_full;
    Pipeline<kRangeStages, Writer::kThreads, Reader::kLoads> range_pipeline;
    int ranges[kRangeStages];
    int last[2], stages;
    float bmm1;
  };
  struct Shared : Tiles, Scales {};

  const BatchDecodeParams& params;
  Shared& shared;
  const int lane;

  FI_DEVICE DecodeTmaKernel(const BatchDecodeParams& params, Shared& shared)
      : params(params), shared(shared), lane(threadIdx.x % 32) {}

  FI_DEVICE void init() const {
    for (Barrier& full : shared.k_full) full.init(1 + kScaleThreads);
    shared.kv_pipeline.init(1 + kScaleThreads, kGroupWarps);
    shared.work_pipeline.init(33, kThreads + 32 + kScaleThreads);
    shared.output_pipeline.init(kThreads, 32);
    shared.partials_full.init(1);
    shared.range_pipeline.init(1, 32);
    fence_barrier_init();
    prefetch_tensor_map(params.copies.k);
    prefetch_tensor_map(params.copies.v);
  }

  // A work tile reads keys [low, high).
  FI_DEVICE int low(const DecodeWorkTile& s) const {
    Mask mask = params.problem.mask;
    mask.kv_len = s.kv_len;
    return max(s.begin * kDecodeKvTile, mask.first_key(0));
  }
  FI_DEVICE int high(const DecodeWorkTile& s) const { return params.end_key(s); }
  FI_DEVICE int first_head(const DecodeWorkTile& s) const { return params.kv_head(s.q_tile) * kHeads; }

  // A work tile in boxes of 2^box_keys_log2 keys, each one TMA copy, counted from its first key. Lane l holds page and
  // slot of boxes l, 32 + l, ..., and loads those of the next 32 boxes ahead.
  struct Boxes {
    DecodeWorkTile s;
    int low, high, page, slot, next_page, next_slot;
    int v_page, next_v_page;  // of NVFP4 with separate tables
  };
  FI_DEVICE void look_up(const Boxes& b, int window, int& page, int& v_page, int& slot, bool values) const {
    const int64_t key =
        static_cast<int64_t>(b.s.begin) * kDecodeKvTile + ((window * 32 + lane) << params.copies.box_keys_log2);
    page = v_page = slot = 0;
    if (key >= b.high || key + (1 << params.copies.box_keys_log2) <= b.low) return;
    const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.pages.page_size));
    const int32_t* const ids = params.pages.page_indices + b.s.first_page + index;
    page = ids[kSplitTables && !kFp4 && values ? params.pages.v_table_offset : 0];
    if constexpr (kSplitTables && kFp4) v_page = ids[params.pages.v_table_offset];
    slot = static_cast<int>(key) - index * static_cast<int>(params.pages.page_size.value);
  }
  // The dynamic ranges, which V's producer warp takes and passes to K's.
  struct DynamicRanges {
    bool values, requested;
    int count, range;  // range: in lane 0 of V's warp, once requested
  };
  // Called well before the range is needed: the atomic takes a microsecond.
  FI_DEVICE void request_range(const DecodeTileScheduler& scheduler, DynamicRanges& ranges) const {
    if (!ranges.values || ranges.requested) return;
    if (lane == 0) ranges.range = take_dynamic_range(params, scheduler.header);
    ranges.requested = true;
  }
  FI_DEVICE bool enter(DecodeTileScheduler& scheduler, DynamicRanges& ranges) const {
    if (scheduler.header.dynamic_ranges == 0) return false;
    const auto at = PipelineState::consumer_at<kRangeStages>(ranges.count);
    int range;
    if (ranges.values) {
      request_range(scheduler, ranges);
      range = __shfl_sync(0xffffffffu, ranges.range, 0);
      shared.range_pipeline.acquire({at.stage, at.phase ^ 1});
      if (lane == 0) shared.ranges[at.stage] = range, shared.range_pipeline.commit(at.stage);
    } else {
      shared.range_pipeline.wait(at);
      range = shared.ranges[at.stage];
      shared.range_pipeline.release(at.stage);
    }
    ++ranges.count, ranges.requested = false;
    scheduler.enter(range);
    return range >= 0;
  }

  // The last work tile is followed by one with q_tile -1 and no keys.
  FI_DEVICE void next(DecodeTileScheduler& scheduler, DynamicRanges& ranges, Boxes& b) const {
    while (!scheduler.next(b.s)) {
      if (enter(scheduler, ranges)) continue;
      b.s.q_tile = -1, b.s.begin = b.low = b.high = 0;
      return;
    }
    b.low = low(b.s), b.high = high(b.s);
    look_up(b, 0, b.page, b.v_page, b.slot, ranges.values);
    look_up(b, 1, b.next_page, b.next_v_page, b.next_slot, ranges.values);
  }

  // By one warp for the keys and one for the values and the queries; of NVFP4 each loads every second stage, keys and
  // values.
  FI_DEVICE void produce(bool values, DecodeTileScheduler& scheduler) const {
    const uint64_t policy = scheduler.header.cost < params.copies.evict_first_tiles ? kEvictFirst : kEvictNormal;
    Boxes now, then;
    then.s.q_tile = then.s.begin = then.low = then.high = 0;  // an empty work tile before the first: the loop needs
    auto at = PipelineState::producer();                      // no prologue
    // Fewer CTAs than SMs need more stages for as many bytes in flight.
    const int in_flight = min(kStages, (kLong * params.copies.multiprocessors + params.num_ctas - 1) / params.num_ctas);
    const int stages = scheduler.header.cost < params.num_ctas * kShortRange ? kStages : in_flight;
    if (lane == 0 && values) shared.stages = stages;
    DynamicRanges ranges{values, false, 0, -1};
    unsigned stage_count = 0;  // of all work tiles
#pragma unroll 1
    for (int count = -1;; ++count) {
      now = then;
      if (now.s.q_tile < 0) break;
      // The next work tile is looked up once the first keys are loading, the next range near the end of this one.
      bool looked_up = false;
      load_keys(now, values, policy, stages, at, stage_count, [&](int keys_left) {
        if (looked_up) return;
        if (scheduler.done() && keys_left > kLookAhead * kKeys) {
          if (keys_left <= 2 * kLookAhead * kKeys) request_range(scheduler, ranges);
          return;
        }
        looked_up = true;
        next(scheduler, ranges, then);
        if (values) publish(then.s, count + 1);  // long before its keys: queries arrive after all earlier copies
      });
    }
    pdl_launch_dependents();
  }

  // Publishes a work tile to the consumers and loads its queries.
  FI_DEVICE void publish(const DecodeWorkTile& s, int count) const {
    const auto at = PipelineState::producer_at<kWorkStages>(static_cast<unsigned>(count));
    shared.work_pipeline.acquire(at);
    if (s.q_tile >= 0) {
      constexpr int kChunks = kDim * sizeof(Q) / 16;
      const AttentionProblem& p = params.problem;
      DecodeEpilogue tile(params, s, kDim);
      if constexpr (kHeads > 1) tile.select_head(0);
#pragma unroll 1
      for (int i = lane; i < tile.rows * kChunks; i += 32) {  // a bulk copy per row takes a hundred cycles
        const int r = i / kChunks, chunk = i % kChunks * 16;
        const Row row = params.row(tile.kv_head, tile.first + r);
        const int64_t token = params.first_token(s.request) + row.i;
        const Q* from = static_cast<const Q*>(p.q) + token * p.q_token + row.head * p.q_head;
        cp_async_16(reinterpret_cast<char*>(shared.queries[at.stage][r]) + chunk,
                    reinterpret_cast<const char*>(from) + chunk);
      }
    }
    shared.work_pipeline.commit_copies(at.stage);
    if (lane == 0) shared.work_tiles[at.stage] = s, shared.work_pipeline.commit(at.stage);
  }

  // Loads the keys of a work tile. Calls `then` with the number of keys left after each stage; once if there are none.
  template <class Then>
  FI_DEVICE void load_keys(Boxes& b, bool values, uint64_t policy, int stages, PipelineState& at, unsigned& stage_count,
                           Then&& then) const {
    const int shift = params.copies.box_keys_log2, boxes = kKeys >> shift, head = first_head(b.s);
    const TensorMap& map = values && !kFp4 ? params.copies.v : params.copies.k;
    constexpr int kStageBytes = kKeys * kTokenBytes;
    char* const ring = shared.kv[values && !kFp4][0];
    Barrier* const full = values || kFp4 ? shared.kv_pipeline.full : shared.k_full;
    int first_box = 0;  // of the stage, in the segment
#pragma unroll 1
    for (int key = b.s.begin * kDecodeKvTile; key < b.high || first_box == 0; key += kKeys, first_box += boxes) {
      if (key < b.high) {
        const bool mine = !kFp4 || (stage_count++ & 1) == static_cast<unsigned>(values);
        int to = 0;
        if (mine) {
          shared.kv_pipeline.acquire(at);
          to = (min(b.high - key, kKeys) + (1 << shift) - 1) >> shift;
        }
        // A stage smaller than a KV tile may end before low.
        const int from = min(max(b.low - key, 0) >> shift, to);
        if (mine && lane == 0) full[at.stage].arrive_expect((to - from) * (kTokenBytes << shift));
        __syncwarp();
#pragma unroll 1
        for (int done = 0; done < boxes;) {
          const int index = (first_box + done) % 32;  // in the window
          const int box = done + lane - index;
          const int these = min(boxes - done, 32 - index);
          if (lane >= index && lane < index + these && box >= from && box < to)
            copy(ring + at.stage * kStageBytes, map, full[at.stage], box << shift, head, b, policy);
          done += these;
          if (index + these == 32) {
            b.page = b.next_page, b.v_page = b.next_v_page, b.slot = b.next_slot;
            look_up(b, (first_box + done) / 32 + 1, b.next_page, b.next_v_page, b.next_slot, values);
          }
        }
        at.advance(stages);
      }
      then(b.high - key - kKeys);
    }
  }

  // By one lane. key: the first key of the box, counted in the stage.
  FI_DEVICE void copy(char* stage, const TensorMap& map, Barrier& barrier, int key, int head, const Boxes& b,
                      uint64_t policy) const {
    KV* to = reinterpret_cast<KV*>(stage + key * kTokenBytes);
    const int line = (128 / sizeof(KV)) << params.copies.box_keys_log2;
    tma_load_tile<kWhole ? 1 : kDim>(to, line, map, barrier, 0, b.slot, 0, head, b.page, policy);
    if (!kFp4 || params.copies.joined) return;
    const int of_head = kKeyBytes << params.copies.box_keys_log2;
#pragma unroll 1
    for (int h = 0;;) {
      tma_load_tile<1>(to + of_head, line, params.copies.v, barrier, 0, b.slot, 0, head + h,
                       kSplitTables ? b.v_page : b.page, policy);
      if (++h == kHeads) return;
      to += 2 * of_head;
      tma_load_tile<1>(to, line, map, barrier, 0, b.slot, 0, head + h, b.page, policy);
    }
  }

  // Copies the scales of the work tiles that are published. A lane copies those of four neighbouring keys of a head at
  // a time, which one page has: its size is a multiple of four.
  FI_DEVICE void produce_scales() const {
    constexpr int kRounds = kStageKeys / 128;
    const KvScales& scales = params.problem.kv_scales;
    const bool dense = scales_are_dense<kDim>(scales);
    auto at = PipelineState::producer();
#pragma unroll 1
    for (int count = 0;; ++count) {
      const auto work_at = PipelineState::consumer_at<kWorkStages>(static_cast<unsigned>(count));
      shared.work_pipeline.wait(work_at);
      const DecodeWorkTile s = shared.work_tiles[work_at.stage];
      const int stages = shared.stages;
      shared.work_pipeline.release(work_at.stage);
      if (s.q_tile < 0) return;
      const int from = low(s), to = high(s), head = first_head(s) + (kHeads > 1 ? lane * 4 / kKeys : 0);
      PagedKv tokens{params.pages.page_indices + s.first_page, params.pages.last_page, params.pages.page_size, 0, 0};
      tokens.set_v_table(params.pages.v_table_offset);
      const uint8_t* const k = scales.k + head * scales.k_head;
      const uint8_t* const v = scales.v + head * scales.v_head;
      int page[kRounds], v_page[kRounds];
      const auto first_of = [&](int key, int i) {
        return min(max(key + i * 128 + lane * 4 % kKeys, from & ~3), (to - 1) & ~3);
      };
      const auto look_up = [&](int key) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          page[i] = v_page[i] = static_cast<int>(tokens.page(first_of(key, i)));
          if constexpr (kSplitTables) v_page[i] = static_cast<int>(tokens.v_page_of(first_of(key, i)));
        }
      };
      int key = s.begin * kDecodeKvTile;
      if (key < to) look_up(key);
#pragma unroll 1
      for (; key < to; key += kKeys) {
        const uint8_t *k_from[kRounds], *v_from[kRounds];
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int slot = tokens.slot(first_of(key, i));
          k_from[i] = k + page[i] * scales.k_page + slot * scales.k_token;
          v_from[i] = v + v_page[i] * scales.v_page + slot * scales.v_token;
        }
        if (key + kKeys < to) look_up(key + kKeys);  // long before they are needed
        shared.kv_pipeline.acquire(at);
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int row = i * 128 + lane * 4, j = key + i * 128 + lane * 4 % kKeys;
          copy_four_scales<kDim>(shared.k_scales(at.stage) + row * kDim / 16, k_from[i], scales.k_token, dense,
                                 from - j, to - j);
          copy_four_scales<kDim>(shared.v_scales(at.stage) + row * kDim / 16, v_from[i], scales.v_token, dense,
                                 from - j, to - j);
        }
        shared.kv_pipeline.commit_copies(at.stage);
        at.advance(stages);
      }
    }
  }

  FI_DEVICE KvTile kv_tile() const {
    if constexpr (kFp4)
      return {params.copies.box_keys_log2, params.copies.joined < 0};
    else
      return {params.copies.box_keys_log2};
  }

  FI_DEVICE void consume() const {
    const int warp = threadIdx.x / 32, first_key = warp % kGroupWarps * kWarpKeys;
    const int slice = warp % kHeadWarps * kWarpKeys;  // of its head
    Tile tile(kv_tile(), first_key);
    // A counter of passes through the stages: with a PipelineState in its place e4m3 keys take 206 registers, not 183.
    // ahead: from the first stage of a work tile to the first one of this warp's group.
    int ahead = kGroups == 1 ? 0 : warp / kGroupWarps, stage = ahead;
    unsigned pass = 0;
#pragma unroll 1
    for (int count = 0;; ++count) {
      const auto work_at = PipelineState::consumer_at<kWorkStages>(static_cast<unsigned>(count));
      shared.work_pipeline.wait(work_at);
      const DecodeWorkTile& s = shared.work_tiles[work_at.stage];
      if (s.q_tile < 0) break;
      const auto problem = [&] { return params.keys_of(s.request, s.kv_len, shared.bmm1); };
      {
        DecodeEpilogue tile_of(params, s, kDim);
        if constexpr (kHeads > 1) tile_of.select_head(tile.first_key / kKeys);
        const int row = kHeads > 1 ? -tile_of.first : 0, rows = kHeads > 1 ? params.problem.group() : tile_of.rows;
        tile.begin(params, problem(), tile_of.kv_head, tile_of.first + row, rows, shared.queries[work_at.stage][row]);
      }
      const int from = low(s), to = high(s);
      int tile_key = s.begin * kDecodeKvTile + ahead * kKeys;
#pragma unroll 1
      for (; tile_key < to; tile_key += kGroups * kKeys) {
        const int key = tile_key + slice;
        const PipelineState at{stage, static_cast<int>(pass & 1)};
        if constexpr (kFp4)
          shared.kv_pipeline.wait(at);
        else
          shared.k_full[stage].wait(at.phase);
        const auto values = [&] {
          if constexpr (!kFp4) shared.kv_pipeline.wait(at);
        };
        char* const both = shared.kv[0][0] + 2 * stage * KvTile::kBytes;
        const KvStage kv{kFp4 ? both : shared.kv[0][stage], kFp4 ? both : shared.kv[1][stage], shared.k_scales(stage),
                         shared.v_scales(stage)};
        if (tile.plain(key, from, to))
          tile.template attend<true>(problem, shared.queries[work_at.stage][0], kv, key, from, to, values);
        else if (key < to && key + kWarpKeys > from)
          tile.template attend<false>(problem, shared.queries[work_at.stage][0], kv, key, from, to, values);
        shared.kv_pipeline.release_warp(stage, lane);
        stage += kGroups;
        if (stage >= shared.stages) stage -= shared.stages, ++pass;
      }
      if constexpr (kGroups > 1) {
        const int keys = tile_key - s.begin * kDecodeKvTile, all = max(to - s.begin * kDecodeKvTile, 0);
        ahead = keys / kKeys - (all + kKeys - 1) / kKeys;
      }
      const DecodeEpilogue epilogue(params, s, kDim);
      const bool last = is_last(count);
      shared.output_pipeline.acquire(PipelineState::producer_at<1>(static_cast<unsigned>(count)));
      tile.store(kHeads > 1 ? params.problem.group() : epilogue.rows, shared.output[warp][0], kOutputPitch,
                 shared.states[warp]);
      if (last) {
        barrier_sync(1, kThreads);
        const int thread = warp * 32 + lane;  // threadIdx.x, without a register of its own
        BulkEpilogueThreads<kDirect, kThreads> threads(thread, 1, &shared.last[0], shared.partials_full,
                                                       shared.states[0], shared.kv[0][0],
                                                       sizeof shared.kv);  // is free
        complete(epilogue, threads, [] {});
        return;
      }
      shared.output_pipeline.commit(0);
      shared.work_pipeline.release(work_at.stage);
    }
  }

  // Whether work tile `count` is the last. Waits until the next one is published.
  FI_DEVICE bool is_last(int count) const {
    const auto next = PipelineState::consumer_at<kWorkStages>(static_cast<unsigned>(count + 1));
    shared.work_pipeline.wait(next);
    return shared.work_tiles[next.stage].q_tile < 0;
  }

  // Page ids and queries are found by dependent loads. All CTAs together prefetch them into L2.
  FI_DEVICE void prefetch() const {
    prefetch(params.pages.page_indices, params.copies.index_bytes);
    prefetch(params.problem.q, params.copies.query_bytes);
  }
  FI_DEVICE void prefetch(const void* from, int64_t bytes) const {
    const int64_t line = blockIdx.x + static_cast<int64_t>(lane) * params.num_ctas;
    if (bytes <= params.num_ctas * 32 * 128 && line * 128 < bytes)
      prefetch_l2(static_cast<const char*>(from) + line * 128);
  }

  // Runs the epilogue of all work tiles except the last. The consumers, which are more threads, run that one.
  FI_DEVICE void run_epilogues() const {
#pragma unroll 1
    for (int count = 0;; ++count) {
      const auto at = PipelineState::consumer_at<kWorkStages>(static_cast<unsigned>(count));
      shared.work_pipeline.wait(at);
      const DecodeWorkTile& s = shared.work_tiles[at.stage];
      if (s.q_tile < 0 || is_last(count)) return;
      shared.output_pipeline.wait(PipelineState::consumer_at<1>(static_cast<unsigned>(count)));
      EpilogueThreads<kDirect, kChunkLoads> threads{lane, 32, 2, &shared.last[1]};
      complete(DecodeEpilogue(params, s, kDim), threads, [&] { shared.output_pipeline.release(0); });
      shared.work_pipeline.release(at.stage);
    }
  }

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) init();
    pdl_wait();
    if (static_cast<int>(threadIdx.x) / 32 == kThreads / 32 + 2) prefetch();
    if (threadIdx.x == 0) shared.bmm1 = params.scales.bmm1 ? *params.scales.bmm1 : 1.f;
    const int role = static_cast<int>(threadIdx.x) - kThreads;
    DecodeTileScheduler scheduler;
    if (role >= 0 && role < 64) scheduler.begin(params.schedule, blockIdx.x, params.queries());
    __syncthreads();
    if constexpr (kMovesRegisters) {
      if (role < 0)
        take_registers<kConsumerRegisters>();
      else
        give_registers<kProducerRegisters>();
    }
    if (role < 0)
      consume();
    else if (role < 64)
      produce(role >= 32, scheduler);
    else if (role < 96)
      run_epilogues();
    else if constexpr (kFp4)
      produce_scales();
  }

  template <class Threads, class Released>
  FI_DEVICE void complete(const DecodeEpilogue& epilogue, Threads& threads, Released&& released) const {
    epilogue.run(
        threads,
        [&](int r, int x) {
          const int head = kHeads > 1 ? epilogue.head_of(r) : 0, row = r - head * params.problem.group();
          const auto warp = [&](int i) { return i / kHeadWarps * kGroupWarps + head * kHeadWarps + i % kHeadWarps; };
          return DecodeEpilogue::merged_warps<kWarps / kHeads>([&](int i) { return shared.states[warp(i)][row]; },
                                                               [&](int i) { return &shared.output[warp(i)][row][x]; });
        },
        released,
        [&](int r, int x, const PartialOutput& values) {
          DecodeEpilogue of_head = epilogue;
          if constexpr (kHeads > 1) of_head.select_head(epilogue.head_of(r));
          of_head.write(r, x, values);
        });
  }
};

// Grid: the CTAs of the schedule. Threads: the consumer warps, two producer warps, the epilogue warp, with NVFP4 a
// producer warp of scales.
template <class T, class Q, class KV, int kDim, int kWarps, int kWarpKeys, int kStages, int kLong, bool kWhole,
          int kSharedBytes, int kGroups = 1, int kRows = kDecodeQTile, int kHeads = 1>
FI_DEVICE void batch_decode_tma(const BatchDecodeParams& params) {
  using Kernel = DecodeTmaKernel<T, Q, KV, kDim, kWarps, kWarpKeys, kStages, kLong, kWhole, kGroups, kRows, kHeads>;
  static_assert(sizeof(typename Kernel::Shared) + kSwizzlePeriod == kSharedBytes,
                "the launch requests this many bytes");
  run_in_shared<Kernel, kSwizzlePeriod, kSharedBytes>(params);
}

}  // namespace fi
