// Batch prefill on Hopper: persistent warp-specialised CTAs. A tile scheduler warp, TMA producer warps for Q, K and V,
// and consumer warpgroups of 64 rows each (wgmma): the softmax of one warpgroup overlaps the products of the others.
#pragma once
#include "fi/attention/prefill/online_softmax_sm90.cuh"
#include "fi/attention/prefill/tma_producer_sm90.cuh"
#include "fi/attention/softmax.h"
#include "fi/cuda/convert.cuh"
#include "fi/cuda/exchange.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/barrier.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/warpgroup_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"

namespace fi {

// Rows r = token * group + head of the group: a tile reads each key once for all heads that share it.
// kConsumers: groups of 64 rows. kBytes: of shared memory for tiles.
template <class T, int kDimQK, int kDimVO, int kKeys, bool kWholeRows, bool kCapped, int kConsumers,
          int kBytes = 226 * 1024>
struct PrefillKernel {
  static constexpr int kRows = 64 * kConsumers, kStages = 2;
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kDimVO > 128 ? 40 : 56;
  static constexpr int kConsumerRegisters = kConsumers > 2 ? 160 : kDimVO > 128 ? 232 : 224;
  // A block begins with 65536 registers shared out evenly, by eights; more would wait for ever.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    512 / (kConsumers + 1) / 8 * 8 * (kConsumers + 1),
                "registers");

  // Of a group's part of a unit: 16 bytes each.
  static constexpr int kPart = 128 * (kDimVO / 8 + 1);

  // A thread's part of a row's sum over a key tile, some 32 weights: if it exceeds this, the row's m is raised. So
  // weights exceed 1, by up to 2^13; in 16 bits they are as exact as those up to 1.
  static constexpr float kMostSum = 8192.f;

  // Whether products of values may end while the next ones of keys run, which takes registers for both.
  static constexpr bool kAhead = kConsumers == 2 && kDimVO <= 128;

  // Keys of a shorter step, which the tiles that end a row's keys may take; 0: none.
  static constexpr int kHalf = kKeys == 128 ? 64 : 0;

  // Two tiles of queries where they fit: one group then begins its next tile while others end the last.
  static constexpr int kTileBytes = (kRows * kDimQK + kStages * kKeys * (kDimQK + kDimVO)) * sizeof(T);
  static constexpr int kQueryStages = kTileBytes + kRows * kDimQK * sizeof(T) <= kBytes ? 2 : 1;

  // Tiles in the 128-byte swizzle: [dim / 64][rows][64], or keys and values [rows / 8][dim / 64][8][64] where copies
  // bring whole rows.
  struct Shared {
    alignas(1024) T q[kQueryStages][kRows * kDimQK];
    alignas(1024) T k[kStages][kKeys * kDimQK];
    alignas(1024) T v[kStages][kKeys * kDimVO];
    Barrier q_full[kQueryStages], q_empty[kQueryStages], k_full[kStages], k_empty[kStages], v_full[kStages],
        v_empty[kStages];
    Barrier work_full[2], work_empty[2];
    WorkTile work[2];
  };

  using Producers = PrefillProducers<Shared, T, kDimQK, kKeys, kWholeRows>;
  using Tile = typename Producers::Tile;

  const BatchPrefillParams& p;
  Shared& shared;

  FI_DEVICE PrefillKernel(const BatchPrefillParams& params, Shared& s) : p(params), shared(s) {}

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) init(3, 1);
    __syncthreads();
    pdl_wait();
    // What the first unit of work is found by, one after the other: one wait for memory instead of three.
    if (threadIdx.x == 32) prefetch_l2(p.schedule.requests);
    if (threadIdx.x == 64) prefetch_l2(p.schedule.tiles + blockIdx.x / p.kv_heads);
    if (threadIdx.x == 96 && p.page_indices) prefetch_l2(p.page_indices);
    if (threadIdx.x < 128) {
      give_registers<kProducerRegisters>();
      const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      const Producers producers{p, shared};
      if (warp < 2)
        produce(producers, warp == 0);
      else if (warp == 2 && threadIdx.x % 32 == 0)
        producers.produce_queries();
      else if (warp == 3)
        producers.template schedule<false>();
    } else {
      take_registers<kConsumerRegisters>();
      consume(threadIdx.x / 128 - 1);
    }
  }

  // By a warp. Of one dim, keys and values have one code: there is less to fetch before the first copy.
  FI_DEVICE void produce(const Producers& producers, bool keys) const {
    if constexpr (kDimQK == kDimVO) {
      producers.template produce<kDimQK>(keys ? p.k : p.v, keys ? shared.k : shared.v,
                                         keys ? shared.k_full : shared.v_full, keys ? shared.k_empty : shared.v_empty);
    } else if (keys) {
      producers.template produce<kDimQK>(p.k, shared.k, shared.k_full, shared.k_empty);
    } else {
      producers.template produce<kDimVO>(p.v, shared.v, shared.v_full, shared.v_empty);
    }
  }

  // By one thread. readers: of units of work, besides consumers; writers: how many arrivals fill a stage.
  FI_DEVICE void init(int readers, int writers) const {
    for (int i = 0; i < kQueryStages; ++i) {
      shared.q_full[i].init(1);
      shared.q_empty[i].init(kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      shared.work_full[i].init(1);
      shared.work_empty[i].init(kConsumers + readers);
    }
    for (int s = 0; s < kStages; ++s) {
      shared.k_full[s].init(writers);
      shared.v_full[s].init(writers);
      shared.k_empty[s].init(kConsumers);
      shared.v_empty[s].init(kConsumers);
    }
    fence_barrier_init();
    prefetch_tensor_map(p.q);
    prefetch_tensor_map(p.k);
    prefetch_tensor_map(p.v);
  }

  // A warpgroup issues products of registers no faster than they are computed, so that its own softmax gains nothing
  // from waiting for fewer of them; it is the other groups that fill its time.
  FI_DEVICE void consume(int group) const {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int row = group * 64 + thread / 32 * 16 + lane / 4;  // and row + 8
    // NOTE: known to be uniform at once where registers are left; else ptxas keeps more of them, and spills.
    const uint64_t key = wgmma_operand(shared.k, kKeyGroup), k = kConsumers > 2 ? wgmma_uniform(key) : key;
    const uint64_t v = wgmma_operand(shared.v, kValueGroup, kBlockBytes);
    float o[kDimVO / 2];
    unsigned taken = 0;  // key tiles
    for (int use = 0;; ++use) {
      shared.work_full[use % 2].wait(use / 2 % 2);
      const Tile tile(p, shared.work[use % 2]);
      if (uniform(tile.tokens) == 0) break;
      const int q_stage = use % kQueryStages;
      const uint64_t q = wgmma_uniform(wgmma_operand(shared.q[q_stage] + group * 64 * 64, 1024));
      const int begin = uniform(tile.begin), end = begin + uniform(tile.count);
      // Of this group's rows: key tiles that some row sees, those all of whose keys every row sees, and how many keys
      // of the last one some row sees.
      const int first_token = divide(group * 64, p.group_size);
      const bool any = first_token < tile.tokens;
      const int last_token = min(static_cast<int>(divide(group * 64 + 63, p.group_size)), tile.tokens - 1);
      const int end_key = any ? tile.mask.end_key(tile.token + last_token) : 0;
      const int seen_end = uniform((end_key + kKeys - 1) / kKeys);
      const int seen_begin = uniform(tile.mask.first_key(tile.token + first_token) / kKeys);
      const int clear_end = uniform(tile.mask.end_key(tile.token + first_token) / kKeys);
      const int clear_begin = uniform((tile.mask.first_key(tile.token + last_token) + kKeys - 1) / kKeys);
      const bool half = uniform(end_key - (seen_end - 1) * kKeys) <= kHalf;
      float m[2] = {kMinusInf, kMinusInf}, d[2] = {0.f, 0.f};
      bool ahead = false;  // whether products of values run
      bool fresh = true;   // whether no row has seen a key
#pragma unroll
      for (int i = 0; i < kDimVO / 2; ++i) o[i] = 0.f;
      shared.q_full[q_stage].wait(use / kQueryStages % 2);
      for (int j = end - 1; j >= begin; --j) {
        const int stage = taken % kStages, parity = taken / kStages % 2;
        const uint64_t keys = wgmma_further(k, stage * sizeof(shared.k[0]));
        const Step step{q,
                        kConsumers > 2 ? keys : wgmma_uniform(keys),
                        wgmma_uniform(wgmma_further(v, stage * sizeof(shared.v[0]))),
                        use % 2,
                        j,
                        stage,
                        parity,
                        group,
                        row,
                        j < clear_begin || j >= clear_end,
                        j == begin ? q_stage : -1};
        if (j >= seen_end || j < seen_begin) {
          pass(step, ahead);
          ahead = false;
        } else {
          bool kept[2] = {false, false};
          if (kHalf > 0 && half && j == seen_end - 1)
            take_anew<kHalf ? kHalf : kKeys>(step, kept, o, m, d);
          else if (fresh || !take(step, ahead, kept, o, m, d))
            take_anew<kKeys>(step, kept, o, m, d);
          fresh = false;
          ahead = kAhead;
        }
        ++taken;
      }
      if (kAhead) {
        wgmma_wait<0>();
        wgmma_keep(o);
        if (ahead && thread == 0) shared.v_empty[before(taken % kStages)].arrive();
      }
      if (begin == end && thread == 0) shared.q_empty[q_stage].arrive();
      if (any) {
        bool all = true;
        if (__builtin_expect(tile.num_splits > 1, 0)) all = merge(shared.work[use % 2], o, m, d, group);
        if (all) store(shared.work[use % 2], o, m, d, row, lane);
      }
      barrier_sync(1 + group, 128);
      if (thread == 0) shared.work_empty[use % 2].arrive();
    }
  }

 private:
  FI_DEVICE static int before(int stage) { return stage == 0 ? kStages - 1 : stage - 1; }

  // A key tile of a tile of queries, as one group takes it.
  struct Step {
    uint64_t q, k, v;
    int work, tile, stage, parity, group, row;
    bool masked;
    int last_of;  // stage of the queries, if this is the last that needs them, else -1
  };

  // No row of the group sees a key of the tile. ahead, here and below: whether products of the last values run.
  FI_DEVICE void pass(const Step& step, bool ahead) const {
    shared.k_full[step.stage].wait(step.parity);
    shared.v_full[step.stage].wait(step.parity);
    if (kAhead && ahead) wgmma_wait<0>();
    barrier_sync(1 + step.group, 128);  // no warp may be left behind by two stages, whose parities are alike
    if (kAhead && ahead) release(shared.v_empty[before(step.stage)]);
    release_keys(step);
    release(shared.v_empty[step.stage]);
  }

  // Computes exp2(score - row_max) with the current row_max, without a max reduction. Returns false if some sum of
  // probabilities is too large; then nothing changes, and `kept` marks the rows whose row_max may stay. The whole
  // warpgroup returns the same, and holds the stage of K until then.
  FI_DEVICE bool take(const Step& step, bool ahead, bool (&kept)[2], float (&o)[kDimVO / 2], const float (&m)[2],
                      float (&d)[2]) const {
    float s[kKeys / 2], sums[2];
    unsigned weights[kKeys / 16][4];
    score(step, ahead, s, o);
    softmax_keep_max(s, {scale(), scale()}, 0.f, m, sums);
    shared.v_full[step.stage].wait(step.parity);
    pack(s, weights);
    const bool large[2] = {sums[0] > kMostSum, sums[1] > kMostSum};
    if (barrier_any(1 + step.group, 128, large[0] || large[1])) {
#pragma unroll
      for (int h = 0; h < 2; ++h) kept[h] = all_of_quad(!large[h]);
      return false;
    }
    release_keys(step);
    d[0] += sums[0], d[1] += sums[1];
    add_values<kKeys>(step, weights, o);
    return true;
  }

  // Recomputes row_max of the rows that are not kept, and rescales their output. Rows see only the first kCount keys of
  // the tile. No products run.
  template <int kCount>
  FI_DEVICE void take_anew(const Step& step, const bool (&kept)[2], float (&o)[kDimVO / 2], float (&m)[2],
                           float (&d)[2]) const {
    float s[kCount / 2], alpha[2];
    unsigned weights[kCount / 16][4];
    score(step, false, s, o);
    release_keys(step);
    online_softmax(s, {scale(), scale()}, 0.f, kept, m, d, alpha);
    pack(s, weights);
#pragma unroll
    for (int i = 0; i < kDimVO / 2; ++i) o[i] *= alpha[i / 2 % 2];
    shared.v_full[step.stage].wait(step.parity);
    add_values<kCount>(step, weights, o);
  }

  // Of the first keys of the tile; o, as products of values may run, comes to hold them.
  template <int kScores>
  FI_DEVICE void score(const Step& step, bool ahead, float (&s)[kScores], float (&o)[kDimVO / 2]) const {
    shared.k_full[step.stage].wait(step.parity);
    multiply_keys(s, step.q, step.k);
    wgmma_wait<0>();
    wgmma_keep(s);
    if (kAhead) wgmma_keep(o);
    if (kAhead && ahead) release(shared.v_empty[before(step.stage)]);
    if constexpr (kCapped) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = CudaMath::tanh(s[i] * p.score_scale);
    }
    if (step.masked)
      apply_mask(p, s, shared.work[step.work], step.row, step.tile * kKeys + static_cast<int>(threadIdx.x) % 4 * 2);
  }

  template <int kCount>
  FI_DEVICE void add_values(const Step& step, const unsigned (&weights)[kCount / 16][4], float (&o)[kDimVO / 2]) const {
    if (step.masked) {  // beyond the last key may be NaN
      const int keys = uniform(shared.work[step.work].request.kv_len - step.tile * kKeys);
      if (keys < kCount) clear(shared.v[step.stage], keys, kCount, 1 + step.group);
    }
    multiply_values(o, weights, step.v);
    if (!kAhead) {
      wgmma_wait<0>();
      wgmma_keep(o);
      release(shared.v_empty[step.stage]);
    }
  }

  FI_DEVICE float scale() const { return kCapped ? p.soft_cap : p.score_scale; }

  // By all threads of a group.
  FI_DEVICE static void release(Barrier& empty) {
    if (threadIdx.x % 128 == 0) empty.arrive();
  }
  FI_DEVICE void release_keys(const Step& step) const {
    if (threadIdx.x % 128 == 0) {
      shared.k_empty[step.stage].arrive();
      if (step.last_of >= 0) shared.q_empty[step.last_of].arrive();
    }
  }

  // Bytes between groups of 8 rows, and between blocks of 64 columns, of keys and values.
  static constexpr unsigned kKeyGroup = kWholeRows ? kDimQK * 16 : 1024, kValueGroup = kWholeRows ? kDimVO * 16 : 1024;
  static constexpr unsigned kBlockBytes = kWholeRows ? 1024 : kKeys * 128;

  template <int kScores>
  FI_DEVICE static void multiply_keys(float (&s)[kScores], uint64_t q, uint64_t k) {
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kDimQK / 64; ++block)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma_m64k16(s, wgmma_further(q, block * kRows * 128 + step * 32),
                     wgmma_further(k, block * kBlockBytes + step * 32), block + step > 0, T());
    wgmma_commit();
  }

  template <int kSteps>
  FI_DEVICE static void multiply_values(float (&o)[kDimVO / 2], const unsigned (&weights)[kSteps][4], uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma_m64k16(o, weights[step], wgmma_further(v, step * 2 * kValueGroup), true, T());
    wgmma_commit();
  }

  template <int kScores, int kSteps>
  FI_DEVICE static void pack(const float (&s)[kScores], unsigned (&weights)[kSteps][4]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  }
  FI_DEVICE static unsigned pack(float low, float high) {
    if constexpr (sizeof(T) == 2 && kIsHalf) {
      const __half2 x = __floats2half2_rn(low, high);
      return reinterpret_cast<const unsigned&>(x);
    } else {
      const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
      return reinterpret_cast<const unsigned&>(x);
    }
  }

  // Zeros value rows [first, end): what lies beyond the last key may be NaN. Each group does it, for itself.
  FI_DEVICE static void clear(T* v, int first, int end, int barrier) {
    constexpr int kPieces = kDimVO / 8;
    for (int i = first * kPieces + threadIdx.x % 128; i < end * kPieces; i += 128) {
      const int key = i / kPieces, piece = i % kPieces;
      char* row = reinterpret_cast<char*>(v) + key / 8 * kValueGroup + key % 8 * 128;
      *reinterpret_cast<uint4*>(row + piece / 8 * kBlockBytes + piece % 8 * 16) = uint4{0, 0, 0, 0};
    }
    fence_async_shared();
    barrier_sync(barrier, 128);
  }

  // Stores the partial of a split. Returns true in the last warp to arrive, in which o, m (row_max) and d (row_sum)
  // become the merge of all splits, in their order.
  FI_DEVICE bool merge(const WorkTile& work, float (&o)[kDimVO / 2], float (&m)[2], float (&d)[2], int group) const {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    float4* all = reinterpret_cast<float4*>(p.partials) +
                  (static_cast<int64_t>(work.split_tile) * p.schedule.header->max_splits * kConsumers + group) * kPart +
                  thread;
    float4* own = all + static_cast<int64_t>(work.split_idx) * kConsumers * kPart;
#pragma unroll
    for (int i = 0; i < kDimVO / 8; ++i) own[i * 128] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
    own[kDimVO / 8 * 128] = {m[0], m[1], d[0], d[1]};
    __syncwarp();
    int32_t* counter = p.schedule.counters + work.split_tile * PrefillSchedule::kWarps + group * 4 + thread / 32;
    const int before = __shfl_sync(0xffffffffu, lane == 0 ? count_device(counter) : 0, 0);
    if (before < work.num_splits - 1) return false;
    if (lane == 0) *counter = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) m[h] = kMinusInf, d[h] = 0.f;
#pragma unroll
    for (int i = 0; i < kDimVO / 2; ++i) o[i] = 0.f;
#pragma unroll 1
    for (int part = 0; part < work.num_splits; ++part, all += kConsumers * kPart) {
      const float4 state = __ldcg(all + kDimVO / 8 * 128);
      const float tops[2] = {state.x, state.y}, sums[2] = {state.z, state.w};
      float old[2], more[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float top = fmaxf(m[h], tops[h]), base = softmax_reference(top);
        old[h] = exp2_approx(m[h] - base);
        more[h] = exp2_approx(tops[h] - base);
        m[h] = top;
        d[h] = d[h] * old[h] + sums[h] * more[h];
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

  FI_DEVICE void store(const WorkTile& work, const float (&o)[kDimVO / 2], const float (&m)[2], const float (&d)[2],
                       int first, int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowEpilogue end(p, work, first + 8 * h, 0.f, m[h], d[h]);
      T* out = static_cast<T*>(p.out) + end.begin + lane % 4 * 8;
#pragma unroll
      for (int block = 0; block < kDimVO / 8; block += 4) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = o + (block + i) * 4 + 2 * h;
          x[i] = pack(pair[0] * end.factor, pair[1] * end.factor);
        }
        const uint4 piece = transpose_of_four(x);
        if (end.exists) store_global(out + block * 8, piece);
      }
    }
  }

  static constexpr bool kIsHalf = IsHalf<T>::value;
};

template <class T, int kDimQK, int kDimVO, int kKeys, bool kWholeRows, bool kCapped, int kConsumers, int kSharedBytes>
FI_DEVICE void batch_prefill(const BatchPrefillParams& params) {
  using Kernel = PrefillKernel<T, kDimQK, kDimVO, kKeys, kWholeRows, kCapped, kConsumers>;
  run_aligned<Kernel, kSharedBytes>(params);
}

}  // namespace fi
