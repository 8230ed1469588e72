// Batch prefill on Hopper: persistent warp-specialised CTAs. A tile scheduler warp, TMA producer warps for Q, K and V,
// and consumer warpgroups of 64 rows each (wgmma): the softmax of one warpgroup overlaps the products of the others.
#pragma once
#include "fi/attention/prefill/half_queries_sm90.cuh"
#include "fi/attention/prefill/online_softmax_sm90.cuh"
#include "fi/attention/prefill/tma_producer_sm90.cuh"
#include "fi/attention/prefill/variant_sm90.cuh"
#include "fi/attention/softmax.h"
#include "fi/cuda/convert.cuh"
#include "fi/cuda/exchange.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"

namespace fi {

// Rows r = token * group + head of the group: a tile reads each key once for all heads that share it.
// kConsumers: groups of 64 rows. kBytes: of shared memory for tiles. kMixed: k and v were fp8, so that scales differ by
// head, the output has any 16-bit type, and queries are of type Query.
template <class T, int kDimQK, int kDimVO, int kKeys, bool kWholeRows, bool kCapped, int kConsumers,
          int kBytes = 226 * 1024, bool kMixed = false, class Query = T>
struct PrefillKernel {
  static constexpr int kRows = 64 * kConsumers, kStages = 2, kGatherWarps = 3;
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kDimVO > 128 ? 40 : 56;
  static constexpr int kConsumerRegisters = kConsumers > 2 ? 160 : kDimVO > 128 ? 232 : 224;
  static_assert(registers_fit(kProducerRegisters + kConsumers * kConsumerRegisters, kConsumers + 1), "registers");

  // float4s of the partial of one consumer warpgroup.
  static constexpr int kPartialFloat4s = 128 * (kDimVO / 8 + 1);

  // The largest sum of a thread's probabilities of a row and KV tile, some 32 of them, that keeps row_max.
  // Probabilities may then exceed 1, by up to 2^13; 16-bit formats hold them as exactly as those up to 1.
  static constexpr float kMaxSum = 8192.f;

  // Whether P V of a KV tile overlaps Q K of the next one, which needs registers for both.
  static constexpr bool kOverlapValues = kConsumers == 2 && kDimVO <= 128;

  // Keys of a shorter step for the last KV tile of a row; 0: none.
  static constexpr int kHalf = kKeys == 128 && Variant::kSoftmax ? 64 : 0;

  // Two stages of queries if they fit: a warpgroup then begins its next work tile while others end the last one.
  static constexpr int kTileBytes = (kRows * kDimQK + kStages * kKeys * (kDimQK + kDimVO)) * sizeof(T);
  static constexpr int kQueryStages = kTileBytes + kRows * kDimQK * sizeof(T) <= kBytes ? 2 : 1;

  // Of keys or values: filled by copies, or by warps that copy rows or convert fp8.
  using TilePipeline = Pipeline<kStages, Writer::kThreads, Reader::kProducts>;
  // Tiles in the 128-byte swizzle: [dim / 64][rows][64], or keys and values [rows / 8][dim / 64][8][64] where copies
  // load whole rows.
  struct Shared {
    alignas(1024) T q[kQueryStages][kRows * kDimQK];
    alignas(1024) T k[kStages][kKeys * kDimQK];
    alignas(1024) T v[kStages][kKeys * kDimVO];
    Pipeline<kQueryStages, Writer::kCopies, Reader::kProducts> q_pipeline;
    TilePipeline k_pipeline, v_pipeline;
    Pipeline<2, Writer::kThreads, Reader::kLoads> work_pipeline;
    WorkTile work[2];
  };

  using Producers = PrefillProducers<Shared, T, kDimQK, kKeys, kWholeRows>;
  using Tile = typename Producers::Tile;

  const BatchPrefillParams& p;
  Shared& shared;
  const Variant::Arguments* const arguments;  // of a user's variant

  FI_DEVICE PrefillKernel(const BatchPrefillParams& params, Shared& s, const Variant::Arguments* a = nullptr)
      : p(params), shared(s), arguments(a) {}

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) init(3, p.copies.gathered ? kGatherWarps : 1);
    __syncthreads();
    pdl_wait();
    prefetch_schedule();
    if (threadIdx.x < kWarpgroup) {
      give_registers<kProducerRegisters>();
      const int warp = warp_index();
      const Producers producers{p, shared};
      const bool gathered = !kWholeRows && p.copies.gathered;
      if (warp == kGatherWarps)
        producers.schedule(gathered);
      else if (gathered)
        gather(producers, warp);
      else if (warp == 2)
        producers.produce_queries();
      else
        produce(producers, warp == 0);
    } else {
      take_registers<kConsumerRegisters>();
      consume(threadIdx.x / kWarpgroup - 1);
    }
  }

  // The first work tile is found through three dependent loads. Prefetching all three waits for memory once.
  FI_DEVICE void prefetch_schedule() const {
    if (threadIdx.x == 32) prefetch_l2(p.schedule.requests);
    if (threadIdx.x == 64) prefetch_l2(p.schedule.tiles + blockIdx.x / p.problem.kv_heads);
    if (threadIdx.x == 96 && p.pages.page_indices) prefetch_l2(p.pages.page_indices);
  }

  // By a warp. Keys and values of one head_dim share one code: fewer instructions to fetch before the first copy.
  FI_DEVICE void produce(const Producers& producers, bool keys) const {
    if constexpr (kDimQK == kDimVO) {
      producers.template produce<kDimQK>(keys ? p.copies.k : p.copies.v, keys ? shared.k : shared.v,
                                         keys ? shared.k_pipeline.full : shared.v_pipeline.full,
                                         keys ? shared.k_pipeline.empty : shared.v_pipeline.empty, !keys);
    } else if (keys) {
      producers.template produce<kDimQK>(p.copies.k, shared.k, shared.k_pipeline.full, shared.k_pipeline.empty, false);
    } else {
      producers.template produce<kDimVO>(p.copies.v, shared.v, shared.v_pipeline.full, shared.v_pipeline.empty, true);
    }
  }

  // By kGatherWarps warps, each of which copies a part of every tile of K and of V. One that waits for an empty stage
  // has passed on all that it copied.
  FI_DEVICE void gather(const Producers& producers, int part) const {
    auto at = PipelineState::producer();
    producers.for_each_tile([&](const Tile& tile) {
      bool keys = false, values = false;  // whether a tile is copied and not passed on
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j) {
        using Pages = typename Producers::template Pages<kGatherWarps>;
        const Pages pages(producers, tile, j, part, false);
        Barrier &key_full = shared.k_pipeline.full[at.stage], &value_full = shared.v_pipeline.full[before(at.stage)];
        Producers::acquire(shared.k_pipeline, at, values, value_full);
        producers.template gather_tile<kDimQK>(p.copies.k_rows, shared.k[at.stage], tile, j, pages);
        Producers::pass_on_previous(values, value_full);
        keys = true;
        Producers::acquire(shared.v_pipeline, at, keys, key_full);
        if constexpr (kSplitTables)
          producers.template gather_tile<kDimVO>(p.copies.v_rows, shared.v[at.stage], tile, j,
                                                 Pages(producers, tile, j, part, true));
        else
          producers.template gather_tile<kDimVO>(p.copies.v_rows, shared.v[at.stage], tile, j, pages);
        Producers::pass_on_previous(keys, key_full);
        values = true;
        at.advance(kStages);
      }
      if (!values) return;
      cp_async_wait<0>();
      Producers::pass_on(shared.v_pipeline.full[before(at.stage)]);
    });
  }

  // By one thread. readers: of work tiles, besides consumers; writers: the arrivals that fill a stage of K or V.
  FI_DEVICE void init(int readers, int writers) const {
    shared.q_pipeline.init(1, kConsumers);
    shared.work_pipeline.init(1, kConsumers + readers);
    shared.k_pipeline.init(writers, kConsumers);
    shared.v_pipeline.init(writers, kConsumers);
    fence_barrier_init();
    prefetch_tensor_map(p.copies.q);
    prefetch_tensor_map(p.copies.k);
    prefetch_tensor_map(p.copies.v);
  }

  // A warpgroup issues wgmma with register operands no faster than the tensor cores run them, so its own softmax does
  // not overlap them. The softmax of one warpgroup overlaps the products of the others.
  FI_DEVICE void consume(int group) const {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int row = group * 64 + thread / 32 * 16 + lane / 4;  // and row + 8
    // NOTE: with two warpgroups or fewer, only the operand of a step is uniform; else ptxas spills.
    const uint64_t key = wgmma_operand(shared.k, kKeyGroup), k = kConsumers > 2 ? wgmma_uniform(key) : key;
    const uint64_t v = wgmma_operand(shared.v, kValueGroup, kBlockBytes);
    float o[kDimVO / 2];
    unsigned taken = 0;  // KV tiles
    for (int use = 0;; ++use) {
      const auto work_at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(work_at);
      const Tile tile(p, shared.work[work_at.stage]);
      if (uniform(tile.tokens) == 0) break;
      const auto q_at = PipelineState::consumer_at<kQueryStages>(use);
      const uint64_t q = wgmma_uniform(wgmma_operand(shared.q[q_at.stage] + group * 64 * 64, 1024));
      const int begin = uniform(tile.begin), end = begin + uniform(tile.count);
      // For this warpgroup's rows: the KV tiles with a visible key (seen), the KV tiles without a masked key (clear),
      // and whether the visible keys of the last KV tile fit a half step.
      const int first_token = divide(group * 64, p.problem.group_size);
      const bool any = first_token < tile.tokens;
      const int last_token = min(static_cast<int>(divide(group * 64 + 63, p.problem.group_size)), tile.tokens - 1);
      const int end_key = any ? tile.mask.end_key(tile.token + last_token) : 0;
      const int seen_end = uniform((end_key - tile.origin + kKeys - 1) / kKeys);
      const int seen_begin = uniform((tile.mask.first_key(tile.token + first_token) - tile.origin) / kKeys);
      const int clear_end = uniform((tile.mask.end_key(tile.token + first_token) - tile.origin) / kKeys);
      const int clear_begin = uniform((tile.mask.first_key(tile.token + last_token) - tile.origin + kKeys - 1) / kKeys);
      const bool half = uniform(end_key - tile.key(seen_end - 1)) <= kHalf;
      constexpr float first_max = Variant::kSoftmax ? kMinusInf : 0.f;
      float row_max[2] = {first_max, first_max}, row_sum[2] = {0.f, 0.f};
      float scales[2] = {};
      if constexpr (kMixed)
        scales[0] = row_scale(p, tile.kv_head, row), scales[1] = row_scale(p, tile.kv_head, row + 8);
      bool values_running = false;  // whether P V of the last KV tile runs
      bool fresh = true;            // whether no KV tile was accumulated
#pragma unroll
      for (int i = 0; i < kDimVO / 2; ++i) o[i] = 0.f;
      shared.q_pipeline.wait(q_at);
      if constexpr (!kIsSame<Query, T>) HalfQueries<kDimQK, kRows>::convert(shared.q[q_at.stage], group, scales);
      for (int j = end - 1; j >= begin; --j) {
        const auto at = PipelineState::consumer_at<kStages>(taken);
        const uint64_t keys = wgmma_further(k, at.stage * sizeof(shared.k[0]));
        const Step step{q,
                        kConsumers > 2 ? keys : wgmma_uniform(keys),
                        wgmma_uniform(wgmma_further(v, at.stage * sizeof(shared.v[0]))),
                        at,
                        work_at.stage,
                        j,
                        group,
                        row,
                        j < clear_begin,
                        j >= clear_end,
                        j == begin ? q_at.stage : -1,
                        {scales[0], scales[1]}};
        if (j >= seen_end || j < seen_begin) {
          skip(step, values_running);
          values_running = false;
        } else {
          if (kHalf > 0 && half && j == seen_end - 1)
            accumulate<kHalf ? kHalf : kKeys>(step, values_running, true, o, row_max, row_sum);
          else
            accumulate<kKeys>(step, values_running, fresh, o, row_max, row_sum);
          fresh = false;
          values_running = kOverlapValues;
        }
        ++taken;
      }
      if (kOverlapValues) {
        wgmma_finish(o);
        if (values_running) shared.v_pipeline.release_warpgroup(before(taken % kStages), thread);
      }
      if (begin == end) shared.q_pipeline.release_warpgroup(q_at.stage, thread);
      if (any) {
        bool all = true;
        if (__builtin_expect(tile.num_splits > 1, 0))
          all = merge(shared.work[work_at.stage], o, row_max, row_sum, group);
        if (all) store(shared.work[work_at.stage], o, row_max, row_sum, row, lane);
      }
      warpgroup_sync(1 + group);
      if (thread == 0) shared.work_pipeline.release(work_at.stage);  // order: group: the warpgroup has met
    }
  }

 private:
  FI_DEVICE static int before(int stage) { return stage == 0 ? kStages - 1 : stage - 1; }

  // One KV tile of a work tile, for one warpgroup.
  struct Step {
    uint64_t q, k, v;
    PipelineState at;
    int work, tile, group, row;
    bool masked_left, masked_right;  // whether a window, or the end of the visible keys, begins in the tile
    int last_of;                     // the stage of Q if this is the last KV tile of the work tile, else -1
    float scale[2];                  // of the rows, if kMixed
  };

  // No row of the warpgroup attends to the KV tile. values_running, here and below: whether P V of the last one runs.
  FI_DEVICE void skip(const Step& step, bool values_running) const {
    shared.k_pipeline.wait(step.at);
    shared.v_pipeline.wait(step.at);
    if (kOverlapValues && values_running) wgmma_wait<0>();
    warpgroup_sync(1 + step.group);  // a warp two stages behind would wait for the wrong phase
    if (kOverlapValues && values_running) release(shared.v_pipeline.empty[before(step.at.stage)]);
    release_keys(step);
    release(shared.v_pipeline.empty[step.at.stage]);
  }

  // Accumulates the first kCount keys of a KV tile. The softmax computes exp2(score - row_max) with the current
  // row_max, without a max reduction. If some sum of probabilities comes out too large, the whole warpgroup computes
  // the scores again, with_max, and row_max of the rows in question. The stage of K is held until then. NOTE: a loop
  // holds the products once. As a second function they take a sixth of the time of the compiler.
  template <int kCount>
  FI_DEVICE void accumulate(const Step& step, bool values_running, bool with_max, float (&o)[kDimVO / 2],
                            float (&row_max)[2], float (&row_sum)[2]) const {
    float s[kCount / 2];
    unsigned weights[kCount / 16][4];
    bool kept[2] = {false, false};  // whether a row keeps row_max
    shared.k_pipeline.wait(step.at);
#pragma unroll 1
    for (;;) {
      score(step, values_running, s, o);
      if constexpr (!Variant::kSoftmax) {
        shared.v_pipeline.wait(step.at);
        pack(s, weights);
        release_keys(step);
        break;
      } else if (kCount < kKeys || with_max) {
        release_keys(step);
        float alpha[2];
        online_softmax(s, {scale(step, 0), scale(step, 1)}, 0.f, kept, row_max, row_sum, alpha);
        pack(s, weights);
#pragma unroll
        for (int i = 0; i < kDimVO / 2; ++i) o[i] *= alpha[i / 2 % 2];
        shared.v_pipeline.wait(step.at);
        break;
      } else {
        float sums[2];
        softmax_keep_max(s, {scale(step, 0), scale(step, 1)}, 0.f, row_max, sums);
        shared.v_pipeline.wait(step.at);
        pack(s, weights);
        const bool large[2] = {sums[0] > kMaxSum, sums[1] > kMaxSum};
        if (!barrier_any(1 + step.group, 128, large[0] || large[1])) {
          release_keys(step);
          row_sum[0] += sums[0], row_sum[1] += sums[1];
          break;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) kept[h] = all_of_quad(!large[h]);
        with_max = true, values_running = false;
      }
    }
    add_values<kCount>(step, weights, o);
  }

  // Computes Q K of the first keys of a full tile, with the soft cap and the mask. Ends a running P V.
  template <int kScores>
  FI_DEVICE void score(const Step& step, bool values_running, float (&s)[kScores], float (&o)[kDimVO / 2]) const {
    wgmma_shared<T, kDimQK>(s, step.q, kRows * 128, step.k, kBlockBytes);
    wgmma_finish(s);
    if (kOverlapValues) wgmma_keep(o);
    if (kOverlapValues && values_running) release(shared.v_pipeline.empty[before(step.at.stage)]);
    if constexpr (kCapped) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = CudaMath::tanh(s[i] * score_scale(step, i / 2 % 2));
    }
    if constexpr (Variant::kCustom)
      score_by_variant(p, *arguments, shared.work[step.work], step.row, step.group, step.tile * kKeys,
                       step.masked_left || step.masked_right, s);
    else if (step.masked_left || step.masked_right)
      apply_mask(p, s, shared.work[step.work], step.row, step.tile * kKeys + static_cast<int>(threadIdx.x) % 4 * 2,
                 step.masked_left, step.masked_right);
  }

  template <int kCount>
  FI_DEVICE void add_values(const Step& step, const unsigned (&weights)[kCount / 16][4], float (&o)[kDimVO / 2]) const {
    if (!kMixed && step.masked_right && !p.copies.gathered) {  // rows beyond the last key may be NaN
      const WorkTile& work = shared.work[step.work];
      const int keys = uniform(work.request.kv_len - work.origin - step.tile * kKeys);
      if (keys < kCount) clear(shared.v[step.at.stage], keys, kCount, 1 + step.group);
    }
    if constexpr (kMixed && kDimVO > 128) {  // of four warpgroups, which begin with too few registers for both halves
      auto& halves = reinterpret_cast<float (&)[2][kDimVO / 4]>(o);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        wgmma_registers<T>(halves[h], weights, wgmma_further(step.v, h * (kDimVO / 128) * kBlockBytes), 2 * kValueGroup,
                           true);
    } else {
      wgmma_registers<T>(o, weights, step.v, 2 * kValueGroup, true);
    }
    if (!kOverlapValues) {
      wgmma_finish(o);
      release(shared.v_pipeline.empty[step.at.stage]);
    }
  }

  // The factor of raw scores of row h.
  FI_DEVICE float score_scale(const Step& step, int h) const {
    return Variant::kCustom ? 1.f : kMixed ? step.scale[h] : p.copies.scores.scale;
  }
  // The same once the soft cap is applied.
  FI_DEVICE float scale(const Step& step, int h) const { return kCapped ? p.copies.scores.cap : score_scale(step, h); }

  // By all threads of a warpgroup. NOTE: takes a barrier; with a stage, ptxas schedules the mask otherwise.
  FI_DEVICE static void release(Barrier& empty) {
    if (threadIdx.x % 128 == 0) empty.arrive();  // order: group: as Pipeline::release_warpgroup
  }
  FI_DEVICE void release_keys(const Step& step) const {
    if (threadIdx.x % 128 == 0) {  // order: group: as Pipeline::release_warpgroup, of both
      shared.k_pipeline.release(step.at.stage);
      if (step.last_of >= 0) shared.q_pipeline.release(step.last_of);
    }
  }

  // Bytes between groups of 8 rows, and between blocks of 64 columns, of keys and values.
  static constexpr unsigned kKeyGroup = kWholeRows ? kDimQK * 16 : 1024, kValueGroup = kWholeRows ? kDimVO * 16 : 1024;
  static constexpr unsigned kBlockBytes = kWholeRows ? 1024 : kKeys * 128;

  template <int kScores, int kSteps>
  FI_DEVICE static void pack(const float (&s)[kScores], unsigned (&weights)[kSteps][4]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = pack_pair(s[8 * k + 2 * i], s[8 * k + 2 * i + 1], T());
  }

  // Zeros value rows [first, end), which may be NaN. Each warpgroup zeros them for itself.
  FI_DEVICE static void clear(T* v, int first, int end, int barrier) {
    constexpr int kPieces = kDimVO / 8;
    for (int i = first * kPieces + threadIdx.x % 128; i < end * kPieces; i += 128) {
      const int key = i / kPieces, piece = i % kPieces;
      char* row = reinterpret_cast<char*>(v) + key / 8 * kValueGroup + key % 8 * 128;
      *reinterpret_cast<uint4*>(row + piece / 8 * kBlockBytes + piece % 8 * 16) = uint4{0, 0, 0, 0};
    }
    fence_async_shared();  // order: writer: wgmma reads the zeros behind the barrier
    warpgroup_sync(barrier);
  }

  // Stores the partial of a split. Returns true in the last warp to arrive, whose o, row_max and row_sum become the
  // merge of all splits, in their order.
  FI_DEVICE bool merge(const WorkTile& work, float (&o)[kDimVO / 2], float (&row_max)[2], float (&row_sum)[2],
                       int group) const {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    float4* all =
        reinterpret_cast<float4*>(p.partials) +
        (static_cast<int64_t>(work.split_tile) * p.schedule.header->max_splits * kConsumers + group) * kPartialFloat4s +
        thread;
    float4* own = all + static_cast<int64_t>(work.split_idx) * kConsumers * kPartialFloat4s;
#pragma unroll
    for (int i = 0; i < kDimVO / 8; ++i) own[i * 128] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
    own[kDimVO / 8 * 128] = {row_max[0], row_max[1], row_sum[0], row_sum[1]};
    __syncwarp();
    int32_t* counter = p.schedule.counters + work.split_tile * PrefillSchedule::kWarps + group * 4 + thread / 32;
    const int arrived = __shfl_sync(0xffffffffu, lane == 0 ? count_device(counter) : 0, 0);
    if (arrived < work.num_splits - 1) return false;
    __syncwarp();  // a shuffle passes the count, not the partials that lane 0 has acquired
    if (lane == 0) *counter = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) row_max[h] = kMinusInf, row_sum[h] = 0.f;
#pragma unroll
    for (int i = 0; i < kDimVO / 2; ++i) o[i] = 0.f;
#pragma unroll 1
    for (int split = 0; split < work.num_splits; ++split, all += kConsumers * kPartialFloat4s) {
      const float4 state = __ldcg(all + kDimVO / 8 * 128);
      const float tops[2] = {state.x, state.y}, sums[2] = {state.z, state.w};
      float old[2], more[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float top = fmaxf(row_max[h], tops[h]), base = softmax_reference(top);
        old[h] = exp2_approx(row_max[h] - base);
        more[h] = exp2_approx(tops[h] - base);
        row_max[h] = top;
        row_sum[h] = row_sum[h] * old[h] + sums[h] * more[h];
      }
#pragma unroll
      for (int i = 0; i < kDimVO / 8; ++i) {
        const float4 x = __ldcg(all + i * 128);
        o[4 * i] = o[4 * i] * old[0] + x.x * more[0];
        o[4 * i + 1] = o[4 * i + 1] * old[0] + x.y * more[0];
        o[4 * i + 2] = o[4 * i + 2] * old[1] + x.z * more[1];
        o[4 * i + 3] = o[4 * i + 3] * old[1] + x.w * more[1];
      }
    }
    return true;
  }

  FI_DEVICE void store(const WorkTile& work, const float (&o)[kDimVO / 2], const float (&row_max)[2],
                       const float (&row_sum)[2], int first, int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (Variant::kCustom) {
        store_by_variant<T>(p, *arguments, work, first + 8 * h, o, h, row_max[h], row_sum[h]);
      } else {
        const RowEpilogue end(p, work, first + 8 * h, 0.f, row_max[h], row_sum[h]);
        const float factor = kMixed ? end.factor * value_scale(p, work.kv_head) : end.factor;
        T* out = static_cast<T*>(p.problem.out) + end.begin + lane % 4 * 8;
#pragma unroll
        for (int block = 0; block < kDimVO / 8; block += 4) {
          unsigned x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* pair = o + (block + i) * 4 + 2 * h;
            x[i] = kMixed ? pack_output(p, pair[0] * factor, pair[1] * factor)
                          : pack_pair(pair[0] * factor, pair[1] * factor, T());
          }
          const uint4 piece = transpose_of_four(x);
          if (end.exists) store_global(out + block * 8, piece);
        }
      }
    }
  }
};

template <class T, int kDimQK, int kDimVO, int kKeys, bool kWholeRows, bool kCapped, int kConsumers, int kSharedBytes>
FI_DEVICE void batch_prefill_wgmma(const BatchPrefillParams& params, const Variant::Arguments& arguments = {}) {
  using Kernel = PrefillKernel<T, kDimQK, kDimVO, kKeys, kWholeRows, kCapped, kConsumers>;
  run_in_shared<Kernel, kSwizzlePeriod, kSharedBytes>(params, &arguments);
}

}  // namespace fi
