// Batch MLA on Hopper for wide q tiles: a persistent CTA of 64 packed query rows. A producer warpgroup loads each KV
// tile once; it serves as K (576 columns) and as V (512). Of two consumer warpgroups each keeps half of the 512 output
// columns in registers. They take alternate KV tiles: one computes scores and softmax of its tile while the tensor
// cores multiply the other's, and both multiply the probabilities of every tile with their half of V.
#pragma once
#include "fi/attention/mla/mla_merge.cuh"
#include "fi/attention/mla/mla_producer_sm90.cuh"
#include "fi/cuda/exchange.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"

namespace fi {

template <class T, class KV, bool kTma>
struct MlaWgmmaKernel {
  using Producer = MlaProducer<T, KV, kTma>;
  using Shared = typename Producer::Shared;
  using Merge = MlaMerge<T, 2 * kWarpgroup, 3, Producer::kRows, 4>;
  static_assert(sizeof(typename Merge::Shared) <= sizeof(Shared::p));
  static constexpr int kRows = Producer::kRows, kKeys = Producer::kKeys, kStages = Producer::kStages;
  static constexpr int kBlocks = Producer::kBlocks, kLatentBlocks = Producer::kLatentBlocks;
  static constexpr int kParts = Producer::kParts, kPartBlocks = Producer::kPartBlocks, kBlock = Producer::kBlock;
  static constexpr int kProducerRegisters = Producer::kFp8 ? 88 : kTma ? 56 : 72;
  static constexpr int kConsumerRegisters = Producer::kFp8 ? 208 : kTma ? 224 : 216;
  static_assert(registers_fit(kProducerRegisters + 2 * kConsumerRegisters, 3), "registers");

  const BatchMlaParams& params;
  Shared& shared;

  FI_DEVICE void run() const {
    const Producer producer{params, shared};
    if (threadIdx.x == 0) producer.init();
    __syncthreads();
    producer.meet();
    pdl_wait();
    const int range = blockIdx.x / params.cluster, first = static_cast<int>(blockIdx.x) % params.cluster * kRows;
    if (warpgroup_index() == 0) {
      give_registers<kProducerRegisters>();
      producer.run(range, first);
    } else {
      take_registers<kConsumerRegisters>();
      consume(producer, first, warpgroup_index() - 1);
    }
    producer.meet();
  }

 private:
  // Of a consumer thread: two rows, row and row + 8.
  struct Rows {
    int end[2];  // keys that the rows attend to
    float row_max[2], row_sum[2];
  };

  // What a consumer thread needs in every iteration.
  struct Consumer {
    uint64_t q, k, v, prob;  // operands; v: this warpgroup's half of stage 0
    int group, thread, lane, row;
    unsigned taken;   // KV tiles of the work tiles before
    int begin, high;  // keys of the work tile
  };
  static constexpr unsigned kStageBytes = kBlocks * kBlock * 2;

  FI_DEVICE void consume(const Producer& producer, int first, int group) const {
    Consumer c;
    c.group = group, c.thread = threadIdx.x % kWarpgroup, c.lane = c.thread % 32, c.row = wgmma_row(c.thread);
    c.q = wgmma_uniform(wgmma_operand(shared.q, 1024));
    c.k = wgmma_uniform(wgmma_operand(shared.kv, 1024));
    c.v = wgmma_uniform(wgmma_operand(shared.kv[0][group * 4], 1024, kBlock * 2));
    c.prob = wgmma_uniform(wgmma_operand(shared.p, 1024));
    c.taken = 0;
    float o[128];
    for (int use = 0;; ++use) {
      const auto work_at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(work_at);
      const MlaWork& s = shared.work[work_at.stage];
      if (uniform(s.index) < 0) break;
      const int row0 = s.q_tile * params.tile_rows + first;
      c.begin = s.begin * kKeys, c.high = producer.high(s, first);
      const int tiles = uniform(c.high > c.begin ? (c.high - c.begin + kKeys - 1) / kKeys : 0);
      Rows rows;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int end = params.end_key(s.request, params.row(row0 + c.row + 8 * h).token);
        rows.end[h] = min(end, c.high) - c.begin;
        rows.row_max[h] = kMinusInf, rows.row_sum[h] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] = 0.f;
      shared.q_full.wait(use % 2);
      fence_async_shared();  // order: waiter: rows by cp.async, whose copiers have no fence behind them
      // KV tile j is that of warpgroup j % 2.
      int j = group;
#pragma unroll 1
      for (; j < tiles; j += 2) {
        if (j > 0 && has_arrived(c, j))
          take_turn<Order::kScoresFirst>(c, j, o, rows);
        else
          take_turn<Order::kOtherFirst>(c, j, o, rows);
      }
      if (tiles > 0 && j == tiles) {  // the last tile is the other's
        add_other(c, j - 1, o, rows);
        wgmma_finish(o);
        release((c.taken + j - 1) % kStages, group);
      }
      c.taken += tiles;
      store(s, o, rows, row0, c.row, c.thread, group);
      if (!s.is_whole()) {  // nobody reads probabilities any more
        auto& scratch = *reinterpret_cast<typename Merge::Shared*>(shared.p);
        const int cta = first / kRows;
        Merge{params, s, scratch, static_cast<int>(threadIdx.x) - kWarpgroup, first, cta}.run();
      }
      shared.work_pipeline.release_warp(work_at.stage, c.lane);
    }
  }

  // An iteration of a warpgroup: scores and softmax of KV tile j and its product with V; and the product of tile j - 1,
  // whose probabilities the other warpgroup computes. Whichever is ready first comes first: where loads are slow the
  // tile before must be released early, where they are fast the tensor cores must not wait for the other's softmax.
  enum class Order { kScoresFirst, kOtherFirst };

  // Whether tile j is there before the other's probabilities; the same in the whole warpgroup.
  FI_DEVICE bool has_arrived(const Consumer& c, int j) const {
    const auto at = PipelineState::consumer_at<kStages>(c.taken + j);
    bool arrived = false;
    do {
      arrived = shared.full[at.stage][c.group].test_wait(at.phase);
    } while (!arrived && !shared.p_full.test_wait((c.taken + j - 1) & 1));
    return barrier_any(1 + c.group, kWarpgroup, arrived);
  }

  // NOTE: scores are finished before the other's iteration. With them in flight ptxas does not let the output be
  // rescaled.
  template <Order kOrder>
  FI_DEVICE void take_turn(const Consumer& c, int j, float (&o)[128], Rows& rows) const {
    const auto at = PipelineState::consumer_at<kStages>(c.taken + j);
    float x[32], alpha[2];
    unsigned weights[4][4];
    if (kOrder == Order::kOtherFirst && j > 0) {
      add_other(c, j - 1, o, rows);
      wgmma_finish(o);
      release(at.stage ^ 1, c.group);
    }
    score(x, c, at);
    if (kOrder == Order::kScoresFirst) add_other(c, j - 1, o, rows);
    if (!kTma && params.sparse) {
      drop_absent(x, at.stage, c.lane);
      __syncwarp();  // all lanes have read `exists`
    }
    release(at.stage, 2);
    softmax(x, rows, alpha, j, c.lane);
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[step][i] = pack_pair(x[8 * step + 2 * i], x[8 * step + 2 * i + 1], T());
    if (kOrder == Order::kScoresFirst) {
      wgmma_finish(o);
      release(at.stage ^ 1, c.group);
    }
    const int left = c.high - c.begin - j * kKeys;
    if (kTma && left < kKeys) clear(at.stage, left, c.thread);
    warpgroup_sync(1 + c.group);  // all warps have read the other's probabilities
    publish(weights, rows, alpha, c.row, c.thread, c.lane);
    rescale(o, alpha);
    wgmma_registers<T>(o, weights, wgmma_further(c.v, at.stage * kStageBytes), 2048, true);
    wgmma_finish(o);
    release(at.stage, c.group);
  }

  // Begins the product of KV tile j, which is the other warpgroup's, with this half of V.
  FI_DEVICE void add_other(const Consumer& c, int j, float (&o)[128], Rows& rows) const {
    const unsigned number = c.taken + j;
    shared.p_full.wait(number & 1);
    float alpha[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      alpha[h] = shared.alpha[c.row + 8 * h];
      rows.row_max[h] = shared.row_max[c.row + 8 * h];
      rows.row_sum[h] *= alpha[h];
    }
    rescale(o, alpha);
    fence_async_shared();  // order: waiter: V may be of cp.async, for which the other warpgroup has waited
    const uint64_t values = wgmma_further(c.v, number % kStages * kStageBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<true>(o, wgmma_further(c.prob, step * 32), wgmma_further(values, step * 2048), true, T(), T());
    wgmma_commit();
  }

  // x = q k^T: products begin with the parts of the tile that have arrived.
  FI_DEVICE void score(float (&x)[32], const Consumer& c, const PipelineState& at) const {
    const uint64_t k = wgmma_further(c.k, at.stage * kStageBytes);
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const int part = Producer::part_of(c.group, n), blocks = n < 2 ? kPartBlocks : 1;
      const unsigned first = part * kPartBlocks * kBlock * 2;
      shared.full[at.stage][part].wait(at.phase);
      if (!kTma && !exchanges()) fence_async_shared();  // order: waiter: a fence of the producer waits for its loads
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < blocks; ++b)
#pragma unroll
        for (int step = 0; step < 4; ++step)
          wgmma(x, wgmma_further(c.q, first + b * kBlock * 2 + step * 32),
                wgmma_further(k, first + b * kBlock * 2 + step * 32), n + b + step > 0, T(), T());
    }
    wgmma_commit();
    wgmma_finish(x);
  }

  // Sparse tables: sets the scores of keys that do not exist to -inf.
  FI_DEVICE void drop_absent(float (&x)[32], int stage, int lane) const {
    const uint2 words = *reinterpret_cast<const uint2*>(shared.exists[stage]);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const unsigned bits = (i < 16 ? words.x : words.y) >> (lane % 4 * 2);
      if (!(bits >> (i / 4 % 4 * 8 + i % 2) & 1)) x[i] = kMinusInf;
    }
  }

  // Scores of KV tile j of the work tile become probabilities relative to row_max. alpha rescales what came before.
  FI_DEVICE void softmax(float (&x)[32], Rows& rows, float (&alpha)[2], int j, int lane) const {
    const int column = j * kKeys + lane % 4 * 2;
    const float scale = params.score_factor();
    if (min(rows.end[0], rows.end[1]) < (j + 1) * kKeys) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (column + i / 4 * 8 + i % 2 >= rows.end[i / 2 % 2]) x[i] = kMinusInf;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = kMinusInf, other = kMinusInf;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        top = fmaxf(top, x[4 * i + 2 * h]);
        other = fmaxf(other, x[4 * i + 2 * h + 1]);
      }
      top = fmaxf(top, other);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale;
      const float keep = kTma ? kMlaKeepMax : params.keep_max;
      const float old = rows.row_max[h], now = top > old + keep ? top : old, base = softmax_reference(now);
      alpha[h] = now == old ? 1.f : exp2_approx(old - base);
      rows.row_max[h] = now;
      float even = 0.f, odd = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& a = x[4 * i + 2 * h];
        float& b = x[4 * i + 2 * h + 1];
        a = exp2_approx(fmaf(a, scale, -base)), b = exp2_approx(fmaf(b, scale, -base));
        even += a, odd += b;
      }
      rows.row_sum[h] = rows.row_sum[h] * alpha[h] + (even + odd);
    }
  }

  // Multiplies the output by alpha, which is mostly 1.
  FI_DEVICE static void rescale(float (&o)[128], const float (&alpha)[2]) {
    if (!__any_sync(0xffffffffu, alpha[0] != 1.f || alpha[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= alpha[i / 2 % 2];
  }

  // Gives the probabilities of this warpgroup's tile to the other one.
  FI_DEVICE void publish(const unsigned (&weights)[4][4], const Rows& rows, const float (&alpha)[2], int row,
                         int thread, int lane) const {
    const int line = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8, chunk = lane / 16;
#pragma unroll
    for (int step = 0; step < 4; ++step)
      stmatrix_x4(reinterpret_cast<char*>(shared.p) + swizzled_offset(line, step * 2 + chunk), weights[step]);
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) shared.alpha[row + 8 * h] = alpha[h], shared.row_max[row + 8 * h] = rows.row_max[h];
    }
    fence_async_shared();    // order: writer: wgmma of the other warpgroup reads what this lane has stored
    shared.p_full.arrive();  // order: thread: every thread arrives for its own stores
  }

  // Zeros keys [first, 64) of a stage that TMA has filled: tokens beyond the last may be NaN.
  FI_DEVICE void clear(int stage, int first, int thread) const {
    for (int i = first * 8 + thread; i < kKeys * 8; i += kWarpgroup)
#pragma unroll
      for (int block = 0; block < kLatentBlocks; ++block)
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(shared.kv[stage][block]) + i * 16) = uint4{0, 0, 0, 0};
    fence_async_shared();  // order: writer: wgmma reads the zeros behind the barrier of the warpgroup
  }

  FI_DEVICE bool exchanges() const { return Producer{params, shared}.exchanges(); }
  FI_DEVICE void release(int stage, int part) const { Producer{params, shared}.release(stage, part); }

  // Where a consumer thread keeps four outputs of each block of 8 columns until the next chunk: as registers have them,
  // so that a warp stores and loads whole lines. first: the CTA's first row of the q tile.
  FI_DEVICE float4* kept(const MlaWork& s, int first, int group, int thread) const {
    return reinterpret_cast<float4*>(params.partial_output(s.partial()) + static_cast<int64_t>(first) * kMlaLatent) +
           group * kWarpgroup + thread;
  }
  static constexpr int kKeptStep = 2 * kWarpgroup;

  // Adds the state of the chunks before to that of two rows, `place` of the q tile and 8 behind: this thread's part.
  FI_DEVICE void fold(const MlaWork& s, float (&o)[128], Rows& rows, float (&total)[2], int place,
                      const float4* from) const {
    MlaFold folds[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 before = __ldcg(reinterpret_cast<const float2*>(params.partial_states(s.partial())) + place + 8 * h);
      folds[h] = mla_fold<CudaMath>(before.x, before.y, rows.row_max[h], total[h]);
      rows.row_max[h] = folds[h].row_max, total[h] = folds[h].row_sum;
    }
#pragma unroll
    for (int block = 0; block < 32; ++block) {
      const float4 x = __ldcg(from + block * kKeptStep);
      float* of_block = o + block * 4;
      of_block[0] = folds[0].value(x.x, of_block[0]), of_block[1] = folds[0].value(x.y, of_block[1]);
      of_block[2] = folds[1].value(x.z, of_block[2]), of_block[3] = folds[1].value(x.w, of_block[3]);
      if (block % 4 == 3) asm volatile("" ::: "memory");  // more loads in flight spill
    }
  }

  // The epilogue of a work tile.
  FI_DEVICE void store(const MlaWork& s, float (&o)[128], Rows& rows, int row0, int row, int thread, int group) const {
    const int lane = thread % 32, count = s.request.qo_len * static_cast<int>(params.heads.value);
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.row_sum[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) shared.row_sum[group][row + 8 * h] = sum;
    }
    __syncwarp();  // racecheck does not see the stores of single lanes before a named barrier without it
    barrier_sync(3, 2 * kWarpgroup);
    if (lane == 0) shared.q_empty.arrive();  // order: group: all warps have met behind their last wgmma
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] = shared.row_sum[0][row + 8 * h] + shared.row_sum[1][row + 8 * h];
    barrier_sync(3, 2 * kWarpgroup);
    if constexpr (kMlaFixedSplits) {
      const int first = row0 - s.q_tile * params.tile_rows;
      if (s.folds()) {
        fold(s, o, rows, total, first + row, kept(s, first, group, thread));
        barrier_sync(3, 2 * kWarpgroup);  // all threads have read what was kept
      }
      if (s.keeps()) {
        float4* to = kept(s, first, group, thread);
#pragma unroll
        for (int block = 0; block < 32; ++block)
          __stcg(to + block * kKeptStep,
                 make_float4(o[block * 4], o[block * 4 + 1], o[block * 4 + 2], o[block * 4 + 3]));
        if (group == 0 && lane % 4 == 0)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            reinterpret_cast<float2*>(params.partial_states(s.partial()))[first + row + 8 * h] =
                make_float2(rows.row_max[h], total[h]);
        return;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row0 + row + 8 * h;
      if (s.is_whole()) {
        const bool exists = r < count;
        const auto at = params.row(exists ? r : 0);
        const int64_t token = s.request.qo_begin + at.token;
        T* out = static_cast<T*>(params.out) + token * params.out_token + at.head * params.out_head + group * 256 +
                 lane % 4 * 8;
        float row_max = rows.row_max[h], row_sum = total[h];
        const float factor = params.finish<CudaMath>(at.head, row_max, row_sum);
#pragma unroll
        for (int block = 0; block < 32; block += 4) {
          unsigned words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* pair = o + (block + i) * 4 + 2 * h;
            words[i] = pack_pair(pair[0] * factor, pair[1] * factor, T());
          }
          const uint4 piece = transpose_of_four(words);
          if (exists) store_global(out + block * 8, piece);
        }
        if (exists && group == 0 && lane % 4 == 0) {
          if (params.lse) params.write_lse<CudaMath>(token, at.head, row_max, row_sum);
          if (params.score_stats) params.write_stats<CudaMath>(token, at.head, rows.row_max[h], total[h]);
        }
      } else {
        const int place = r - s.q_tile * params.tile_rows;
        float* out =
            params.partial_output(s.partial()) + static_cast<int64_t>(place) * kMlaLatent + group * 256 + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < 32; ++block)
          store_global(out + block * 8,
                       make_uint2(__float_as_uint(o[block * 4 + 2 * h]), __float_as_uint(o[block * 4 + 2 * h + 1])));
        if (group == 0 && lane % 4 == 0)
          reinterpret_cast<float2*>(params.partial_states(s.partial()))[place] = make_float2(rows.row_max[h], total[h]);
      }
    }
  }
};

template <class T, class KV, bool kTma, int kSharedBytes>
FI_DEVICE void batch_mla_wgmma(const BatchMlaParams& params) {
  run_in_shared<MlaWgmmaKernel<T, KV, kTma>, kSwizzlePeriod, kSharedBytes>(params);
}

}  // namespace fi
