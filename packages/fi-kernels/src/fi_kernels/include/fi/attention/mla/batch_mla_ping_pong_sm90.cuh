// Batch MLA on Hopper for narrow q tiles: 16 packed query rows, mma.sync. A producer warpgroup loads KV tiles of 32
// keys by cp.async. Two consumers of eight warps take them in turn, so that one multiplies while the other waits; each
// has an output of its own, and a work tile ends with their sum. In a consumer a warp computes the scores of 16 keys
// over a quarter of the columns, then the softmax of two rows, then the products with 64 of the 512 columns.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/attention/mla/mla_dequantize.cuh"
#include "fi/attention/mla/mla_merge.cuh"
#include "fi/attention/mla/mla_work_tiles_sm90.cuh"
#include "fi/cuda/convert.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/swizzle.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"

namespace fi {

// A KV tile is one stage. Rows are loaded by cp.async, so pages may have any size. NOTE: a bulk copy for each row takes
// no registers or addresses, but an SM begins one in 65 cycles, which nearly doubles the time
// (docs/notes/mla-narrow.md).
template <class T, class KV, int kStages>
struct MlaPingPongKernel {
  static constexpr int kRows = 16, kConsumers = 2, kWarps = 8, kConsumerThreads = kWarps * 32;
  static constexpr int kAllConsumerThreads = kConsumers * kConsumerThreads;
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kKeys = kFp8 ? 64 : 32;  // of a KV tile
  // Of the scores of a tile a warp computes 16 keys over one of kParts parts of the columns.
  static constexpr int kParts = kWarps / (kKeys / 16), kPartQuarters = 4 / kParts;
  static constexpr int kLatentBytes = kMlaLatent * sizeof(KV);
  // Bytes of a row, in swizzled lines of 128. The rotary part of an e4m3 cache may have 16 bits.
  // NOTE: with rows padded by 16 bytes, cp.async asks L2 twice for each sector of an odd row, as its halves lie in two
  // sectors of shared memory: 54 sectors for a row of 36 (Nsight Compute).
  static constexpr int kPitch = kLatentBytes + kMlaRope * 2;
  static constexpr int kGroups = kFp8 ? 4 : 1;  // probabilities: times the scale of each 128 columns
  static constexpr int kSteps = kMlaWidth / 16, kLatentSteps = kMlaLatent / 16, kQuarterSteps = kLatentSteps / 4;
  static constexpr int kProbPitch = kKeys + 8, kScorePitch = kKeys + 8;
  static constexpr int kProducerRegisters = 64, kConsumerRegisters = 104;
  static_assert(registers_fit(kProducerRegisters + 4 * kConsumerRegisters, 5), "registers");
  // e4m3 operands are 2^-kShift times too small. Queries and probabilities make up for a part of it, so that no sum is
  // subnormal; scores and outputs for the rest.
  static constexpr bool kShifted = kFp8 && kMlaShift<T> != 0;
  static constexpr float kScoreFactor = kShifted ? 0x1p56f : 1.f, kProbFactor = kShifted ? 0x1p60f : 1.f,
                         kOutFactor = kProbFactor;

  using Merge = MlaMerge<T, kAllConsumerThreads, 3, kRows, 2>;
  struct Exchange {  // of a consumer
    float scores[kParts][kRows][kScorePitch];
  };
  struct Shared {
    alignas(128) char raw[kStages][kKeys * kPitch];
    union {
      struct {
        alignas(16) uint4 q[kSteps][32];  // operands of the lanes
        Exchange exchange[kConsumers];
      };
      float o[32][kConsumerThreads];  // of consumer 1, at the end of a work tile
      typename Merge::Shared merge;
    };
    alignas(16) T prob[kConsumers][kGroups][kRows][kProbPitch];
    alignas(16) float scales[kFp8 ? kStages : 1][kKeys][4];
    float alpha[kConsumers][kRows];
    float2 states[kConsumers][kRows];
    unsigned char exists[kStages][kKeys];
    MlaWorkTile work[2];  // index -1: no more
    Pipeline<kStages, Writer::kThreads, Reader::kLoads> pipeline;
    Pipeline<2, Writer::kThreads, Reader::kLoads> work_pipeline;
  };

  const BatchMlaParams& params;
  Shared& shared;

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) {
      shared.pipeline.init(kWarpgroup + kWarpgroup / 8, kWarps);
      shared.work_pipeline.init(1, kConsumers * kWarps);
      fence_barrier_init();
    }
    __syncthreads();
    pdl_wait();
    if (warp_index() >= kConsumers * kWarps) {
      give_registers<kProducerRegisters>();
      produce();
    } else {
      take_registers<kConsumerRegisters>();
      consume(warp_index() / kWarps, warp_index() % kWarps, threadIdx.x % 32);
    }
  }

 private:
  struct Place {
    int page, slot;  // page -1: no token
  };
  FI_DEVICE Place place(const MlaWorkTile& s, int key, int high) const {
    if (key >= high) return {-1, 0};
    const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.page_size));
    return {params.page(s.request.first_page + index), key - index * static_cast<int>(params.page_size.value)};
  }

  // By the producer warpgroup.
  FI_DEVICE void produce() const {
    MlaTileScheduler scheduler;
    scheduler.enter(params.view(), blockIdx.x);
    MlaWorkTile s;
    auto at = PipelineState::producer();
    const int thread = threadIdx.x - kAllConsumerThreads, key = thread / 8;
    for (int use = 0; publish_next(scheduler, shared, s, use, thread == 0); ++use) {
      const int high = params.high(s, s.q_tile * kRows, kRows);
      constexpr int kEach = kKeys / 16;
      Place now[kEach], next[kEach];
      const auto look_up = [&](int first, Place(&places)[kEach]) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) places[i] = place(s, first + key + 16 * i, high);
      };
      look_up(s.begin * kMlaKvTile, now);
      for (int tile = s.begin * kMlaKvTile; tile < high; tile += kKeys) {
        look_up(tile + kKeys, next);
        shared.pipeline.acquire(at);
#pragma unroll
        for (int i = 0; i < kEach; ++i) load_row(now[i], at.stage, key + 16 * i, thread % 8);
        shared.pipeline.commit_copies(at.stage);
        // Of `exists`, by each thread that has written some: racecheck does not see an arrival for others.
        if (thread % 8 == 0) shared.pipeline.commit(at.stage);
#pragma unroll
        for (int i = 0; i < kEach; ++i) now[i] = next[i];
        at.advance(kStages);
      }
    }
    pdl_launch_dependents();
  }
  // By eight lanes. A key that does not exist becomes zeros.
  FI_DEVICE void load_row(const Place& at, int stage, int key, int chunk) const {
    const bool exists = at.page >= 0;
    const int page = exists ? at.page : 0, rope_bytes = kFp8 && !params.wide_rope ? kMlaRope : kMlaRope * 2;
    char* row = shared.raw[stage] + key * kPitch + swizzled_chunk(key, chunk) * 16;
    const char* ckv = static_cast<const char*>(params.ckv) + params.ckv_offset(page, at.slot) * sizeof(KV) + chunk * 16;
    const char* kpe =
        static_cast<const char*>(params.kpe) + params.kpe_offset(page, at.slot) * (rope_bytes / kMlaRope) + chunk * 16;
#pragma unroll
    for (int i = 0; i < kLatentBytes; i += 128) cp_async_16(row + i, ckv + i, exists);
    if (chunk * 16 < rope_bytes) cp_async_16(row + kLatentBytes, kpe, exists && params.has_rope);
    if (chunk != 0) return;
    if (kFp8 && params.ckv_scales)
      cp_async_16(shared.scales[stage][key],
                  params.ckv_scales + page * params.scales_page + at.slot * params.scales_token, exists);
    shared.exists[stage][key] = exists;
  }

  FI_DEVICE void consume(int consumer, int warp, int lane) const {
    unsigned used = 0;  // stages
    for (int use = 0;; ++use) {
      const auto work_at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(work_at);
      const MlaWorkTile& s = shared.work[work_at.stage];
      if (uniform(s.index) < 0) break;
      const int row0 = s.q_tile * kRows, high = params.high(s, row0, kRows), begin = s.begin * kMlaKvTile;
      const int tiles = high > begin ? (high - begin + kKeys - 1) / kKeys : 0;
      load_queries(s, row0);
      barrier_sync(3, kAllConsumerThreads);
      float o[8][4];  // 16 rows by 64 columns
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] = 0.f;
      Rows rows;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows.end[h] = params.end_key(s.request, params.row(row0 + 2 * warp + h).token);
        rows.row_max[h] = kMinusInf, rows.row_sum[h] = 0.f;
      }
      const float scale = params.score_factor();
#pragma unroll 1
      for (int tile = consumer; tile < tiles; tile += kConsumers) {
        const auto at = PipelineState::consumer_at<kStages>(used + tile);
        shared.pipeline.wait(at);
        compute_scores(at.stage, consumer, warp, lane);
        barrier_sync(1 + consumer, kConsumerThreads);
        softmax(rows, begin + tile * kKeys, scale, at.stage, consumer, warp, lane);
        barrier_sync(1 + consumer, kConsumerThreads);
        add_values(o, at.stage, consumer, warp, lane);
        shared.pipeline.release_warp(at.stage, lane);
      }
      used += tiles;
      store(s, o, rows, row0, consumer, warp, lane);
      if (!s.is_whole()) Merge{params, s, shared.merge, static_cast<int>(threadIdx.x), 0, 0}.run();
      shared.work_pipeline.release_warp(work_at.stage, lane);
    }
  }

  struct Rows {                    // 2 warp and 2 warp + 1
    int end[2];                    // keys that the rows attend to
    float row_max[2], row_sum[2];  // row_sum: this lane's part
  };

  // Queries of a work tile as operands of the score steps: by all consumers. Of an e4m3 step a lane has four columns
  // side by side, as ldmatrix brings them.
  FI_DEVICE void load_queries(const MlaWorkTile& s, int row0) const {
    const int count = s.request.qo_len * static_cast<int>(params.heads.value);
    constexpr int kEach = (kSteps * 32 + kAllConsumerThreads - 1) / kAllConsumerThreads;
    unsigned words[kEach][4];
#pragma unroll
    for (int n = 0; n < kEach; ++n) {  // all loads, then all stores
      const int step = static_cast<int>(threadIdx.x) / 32 + n * (kAllConsumerThreads / 32), lane = threadIdx.x % 32;
      const bool latent = step < kLatentSteps, quads = has_quads(step);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row0 + lane / 4 + 8 * h;
        words[n][h] = words[n][h + 2] = 0;
        if (step >= kSteps || r >= count || (!latent && !params.has_rope)) continue;
        const auto row = params.row(r);
        const int64_t token = s.request.qo_begin + row.token;
        const T* from = latent ? static_cast<const T*>(params.q_nope) + token * params.q_nope_token +
                                     row.head * params.q_nope_head + step * 16
                               : static_cast<const T*>(params.q_pe) + token * params.q_pe_token +
                                     row.head * params.q_pe_head + (step - kLatentSteps) * 16;
        from += lane % 4 * (quads ? 4 : 2);
        words[n][h] = *reinterpret_cast<const unsigned*>(from);
        words[n][h + 2] = *reinterpret_cast<const unsigned*>(from + (quads ? 2 : 8));
      }
    }
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int step = static_cast<int>(threadIdx.x) / 32 + n * (kAllConsumerThreads / 32), lane = threadIdx.x % 32;
      if (step >= kSteps) continue;
      if (kShifted && has_quads(step)) {
#pragma unroll
        for (unsigned& word : words[n])
          asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(word) : "r"(0x5f805f80u), "r"(0x80008000u));  // 2^64
      }
      shared.q[step][lane] = {words[n][0], words[n][1], words[n][2], words[n][3]};
    }
  }
  FI_DEVICE bool has_quads(int step) const { return kFp8 && (step < kLatentSteps || !params.wide_rope); }

  // By warp w: 16 keys from 16 (w / kParts) on, part w % kParts of the latent columns and of the rotary ones.
  FI_DEVICE void compute_scores(int stage, int consumer, int warp, int lane) const {
    const int part = warp % kParts, first = warp / kParts * 16;
    float total[2][4] = {};
#pragma unroll
    for (int i = 0; i < kPartQuarters; ++i) add_scores(total, stage, part * kPartQuarters + i, first, lane);
    float (&scores)[kRows][kScorePitch] = shared.exchange[consumer].scores[part];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(&scores[lane / 4 + 8 * h][first + n * 8 + lane % 4 * 2]) =
            make_float2(total[n][2 * h], total[n][2 * h + 1]);
  }
  // Adds the products of 16 keys with a quarter of the columns.
  FI_DEVICE void add_scores(float (&total)[2][4], int stage, int quarter, int first, int lane) const {
    const char* keys = shared.raw[stage] + first * kPitch;
    const int key = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;  // of ldmatrix: two times eight keys by 32 bytes
    const auto place = [&](int c) { return swizzled_chunk(lane, c + chunk) * 16; };  // chunks c and c + 1 of a line
    float x[2][4] = {}, rope[2][4] = {};
    const uint4* q = &shared.q[quarter * kQuarterSteps][lane];
    const auto multiply = [&](float (&sums)[2][4], const uint4& operand, unsigned b0, unsigned b1, unsigned b2,
                              unsigned b3) {
      const unsigned a[4] = {operand.x, operand.y, operand.z, operand.w};
      mma_m16n8k16(sums[0], a, b0, b1, T());
      mma_m16n8k16(sums[1], a, b2, b3, T());
    };
    const auto multiply_16 = [&](float (&sums)[2][4], const uint4& operand, const char* line, int c) {
      unsigned b[4];
      ldmatrix_x4(b, line + place(c));
      multiply(sums, operand, b[0], b[1], b[2], b[3]);
    };
    const auto multiply_8 = [&](float (&sums)[2][4], const uint4& operand, unsigned low, unsigned high) {
      multiply(sums, operand, mla_shifted(low, kMlaLower, T()), mla_shifted(low, kMlaUpper, T()),
               mla_shifted(high, kMlaLower, T()), mla_shifted(high, kMlaUpper, T()));
    };
    const char* line = keys + key * kPitch + quarter * (kLatentBytes / 4);
    const char* rope_line = keys + key * kPitch + kLatentBytes;
    const uint4 rope_q = shared.q[kLatentSteps + quarter][lane];
    if constexpr (kFp8) {
#pragma unroll
      for (int step = 0; step < kQuarterSteps; step += 2) {
        unsigned b[4];
        ldmatrix_x4(b, line + place(step));
        multiply_8(x, q[step * 32], b[0], b[2]);
        multiply_8(x, q[step * 32 + 32], b[1], b[3]);
      }
      if (params.wide_rope) {
        multiply_16(rope, rope_q, rope_line, quarter * 2);
      } else {
        unsigned b[4];
        ldmatrix_x4(b, rope_line + swizzled_chunk(lane, quarter) * 16);
        multiply_8(rope, rope_q, b[0], b[2]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < kQuarterSteps; ++step)
        multiply_16(step % 2 ? rope : x, q[step * 32], line + step / 4 * 128, step % 4 * 2);
      multiply_16(rope, rope_q, rope_line, quarter * 2);
    }
    const float rope_factor = kFp8 ? params.rope_factor * (params.wide_rope ? 1.f : kScoreFactor) : 1.f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = first + n * 8 + lane % 4 * 2;
      float factors[2] = {kScoreFactor, kScoreFactor};
      if (kFp8 && params.ckv_scales) {
        factors[0] *= shared.scales[stage][column][quarter];
        factors[1] *= shared.scales[stage][column + 1][quarter];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) total[n][i] += x[n][i] * factors[i % 2] + rope[n][i] * rope_factor;
    }
  }

  // By warp w: rows 2 w and 2 w + 1; a lane has every 32nd key.
  FI_DEVICE void softmax(Rows& rows, int key, float scale, int stage, int consumer, int warp, int lane) const {
    constexpr int kEach = kKeys / 32;
    const auto& scores = shared.exchange[consumer].scores;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = 2 * warp + h;
      float x[kEach], top = rows.row_max[h];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = lane + 32 * i;
        float sum = 0.f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) sum += scores[part][r][at];
        x[i] = shared.exists[stage][at] && key + at < rows.end[h] ? sum * scale : kMinusInf;
        top = fmaxf(top, x[i]);
      }
      top = warp_max(top);
      const float base = softmax_reference(top), alpha = exp2_approx(rows.row_max[h] - base);
      rows.row_max[h] = top;
      rows.row_sum[h] *= alpha;
      if (lane == 0) shared.alpha[consumer][r] = alpha;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = lane + 32 * i;
        const float p = exp2_approx(x[i] - base);
        rows.row_sum[h] += p;
        if (kFp8 && params.ckv_scales) {
          const float4 factors = *reinterpret_cast<const float4*>(shared.scales[stage][at]);
          const float each[4] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
          for (int g = 0; g < kGroups; ++g)
            shared.prob[consumer][g][r][at] = from_float<T>(p > 0.f ? p * (each[g] * kProbFactor) : 0.f);
        } else {
          shared.prob[consumer][0][r][at] = from_float<T>(p * kProbFactor);
        }
      }
    }
  }

  // By warp w: columns 64 w .. 64 w + 63 of the output.
  FI_DEVICE void add_values(float (&o)[8][4], int stage, int consumer, int warp, int lane) const {
    const float alpha[2] = {shared.alpha[consumer][lane / 4], shared.alpha[consumer][lane / 4 + 8]};
    if (__any_sync(0xffffffffu, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= alpha[i / 2];
    }
    const int group = kFp8 && params.ckv_scales ? warp / 2 : 0;
    const T* prob = shared.prob[consumer][group][lane % 16] + lane / 16 * 8;
    const char* values = shared.raw[stage] + lane % 16 * kPitch + warp * 64 * static_cast<int>(sizeof(KV)) / 128 * 128;
    const int first = kFp8 ? warp % 2 * 4 : 0;  // chunk of the line
    const auto place = [&](int n) { return swizzled_chunk(lane, first + n + lane / 16) * 16; };
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      unsigned a[4], b[4];
      ldmatrix_x4(a, prob + step * 16);
      const char* from = values + step * 16 * kPitch;
      if constexpr (kFp8) {
        // A word has two columns of two keys: products of the even columns of 16, and of the odd ones.
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          ldmatrix_x4_trans(b, from + place(n));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mma_m16n8k16(o[2 * (n + i)], a, mla_shifted(b[2 * i], kMlaEven, T()),
                         mla_shifted(b[2 * i + 1], kMlaEven, T()), T());
            mma_m16n8k16(o[2 * (n + i) + 1], a, mla_shifted(b[2 * i], kMlaOdd, T()),
                         mla_shifted(b[2 * i + 1], kMlaOdd, T()), T());
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          ldmatrix_x4_trans(b, from + place(n * 2));
          mma_m16n8k16(o[2 * n], a, b[0], b[1], T());
          mma_m16n8k16(o[2 * n + 1], a, b[2], b[3], T());
        }
      }
    }
  }

  // The epilogue of a work tile: the sum of both consumers as output, or as the partial of a split.
  FI_DEVICE void store(const MlaWorkTile& s, float (&o)[8][4], const Rows& rows, int row0, int consumer, int warp,
                       int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = warp_sum(rows.row_sum[h]);
      if (lane == 0) shared.states[consumer][2 * warp + h] = make_float2(rows.row_max[h], sum);
    }
    __syncwarp();  // racecheck does not see the stores of single lanes before a named barrier without it
    barrier_sync(3, kAllConsumerThreads);  // also: nobody reads queries or scores any more
    float row_max[2], row_sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x = shared.states[0][lane / 4 + 8 * h], y = shared.states[1][lane / 4 + 8 * h];
      row_max[h] = fmaxf(x.x, y.x);
      const float base = softmax_reference(row_max[h]);
      const float first = exp2_approx(x.x - base), second = exp2_approx(y.x - base);
      row_sum[h] = x.y * first + y.y * second;
      const float factor = (consumer ? second : first) * kOutFactor;
#pragma unroll
      for (int n = 0; n < 8; ++n) o[n][2 * h] *= factor, o[n][2 * h + 1] *= factor;
    }
    const int thread = warp * 32 + lane;
    if (consumer == 1) {
#pragma unroll
      for (int i = 0; i < 32; ++i) shared.o[i][thread] = o[i / 4][i % 4];
    }
    barrier_sync(3, kAllConsumerThreads);
    if (consumer == 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i / 4][i % 4] += shared.o[i][thread];
    }
    barrier_sync(3, kAllConsumerThreads);
    if (consumer == 0) write(s, o, row_max, row_sum, row0, warp, lane);
  }
  FI_DEVICE void write(const MlaWorkTile& s, const float (&o)[8][4], float (&row_max)[2], float (&row_sum)[2], int row0,
                       int warp, int lane) const {
    const int count = s.request.qo_len * static_cast<int>(params.heads.value);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int place = lane / 4 + 8 * h, column = warp * 64 + lane % 4 * (kFp8 ? 4 : 2);
      if (s.is_whole()) {
        if (row0 + place >= count) continue;
        const auto at = params.row(row0 + place);
        const int64_t token = s.request.qo_begin + at.token;
        T* out = static_cast<T*>(params.out) + token * params.out_token + at.head * params.out_head + column;
        const bool leads = warp == 0 && lane % 4 == 0;
        if (params.score_stats && leads) params.write_stats<CudaMath>(token, at.head, row_max[h], row_sum[h]);
        const float factor = params.finish<CudaMath>(at.head, row_max[h], row_sum[h]);
        each_pair(o, h, [&](int x, float low, float high) {
          *reinterpret_cast<unsigned*>(out + x) = pack_pair(low * factor, high * factor, T());
        });
        if (params.lse && leads) params.write_lse<CudaMath>(token, at.head, row_max[h], row_sum[h]);
      } else {
        float* out = params.partial_output(s.partial()) + static_cast<int64_t>(place) * kMlaLatent + column;
        each_pair(o, h, [&](int x, float low, float high) {
          store_global(out + x, make_uint2(__float_as_uint(low), __float_as_uint(high)));
        });
        if (warp == 0 && lane % 4 == 0)
          reinterpret_cast<float2*>(params.partial_states(s.partial()))[place] = make_float2(row_max[h], row_sum[h]);
      }
    }
  }
  // f(x, low, high) for the pairs of neighbouring columns x and x + 1 of a row, from this thread's first column on.
  template <class F>
  FI_DEVICE static void each_pair(const float (&o)[8][4], int h, F&& f) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if constexpr (kFp8) {  // even columns in one accumulator, odd ones in the next
        const float (&even)[4] = o[n / 2 * 2], (&odd)[4] = o[n / 2 * 2 + 1];
        f(n / 2 * 16 + n % 2 * 2, even[2 * h + n % 2], odd[2 * h + n % 2]);
      } else {
        f(n * 8, o[n][2 * h], o[n][2 * h + 1]);
      }
    }
  }
};

template <class T, class KV, int kStages, int kSharedBytes>
FI_DEVICE void batch_mla_ping_pong(const BatchMlaParams& params) {
  run_in_shared<MlaPingPongKernel<T, KV, kStages>, 128, kSharedBytes>(params);
}

}  // namespace fi
