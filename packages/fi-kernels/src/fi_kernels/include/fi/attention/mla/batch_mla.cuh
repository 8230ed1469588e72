// Batch MLA on sm_80 and later: q tiles of 16 packed query rows in registers, mma.sync. Eight warps share a KV tile:
// each of the first ones computes the scores of eight keys, then each multiplies all probabilities with 64 of the 512
// columns.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/attention/mla/mla_dequantize.cuh"
#include "fi/attention/mla/mla_merge.cuh"
#include "fi/cuda/convert.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/barrier.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/shared_memory.cuh"

namespace fi {

// A KV tile is one stage. Rows are loaded by cp.async, so pages may have any size. kPacked: rows of packed pages are
// dequantized on their way, so that their stages are those of a 16-bit cache without a rotary part.
template <class T, class KV, int kStages, bool kPacked = false>
struct MlaMmaKernel {
  static constexpr int kRows = 16, kWarps = 8, kThreads = kWarps * 32, kTile = 32;
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kScoreWarps = kTile / 8;
  static constexpr int kPitch = kMlaWidth * 2 + 16;  // bytes of a row in 16 bits; an odd number of 16-byte chunks
  static constexpr int kRawPitch = kFp8 ? kMlaLatent + kMlaRope * 2 + 16 : kPitch;
  static constexpr int kGroups = kFp8 ? 4 : 1;  // probabilities: times the scale of each 128 columns
  static constexpr int kProbPitch = kTile + 8;
  static constexpr int kLatentBytes = kMlaLatent * sizeof(KV);
  static constexpr int kSteps = kMlaWidth / 16;

  using Merge = MlaMerge<T, kThreads, 1, kRows, 2>;
  static_assert(sizeof(typename Merge::Shared) <= kRows * kPitch);

  struct Shared {
    alignas(16) char raw[kStages][kTile * kRawPitch];
    alignas(16) char q[kRows * kPitch];
    alignas(16) T prob[kGroups][kRows][kProbPitch];
    alignas(16) float scales[kFp8 ? kStages : 1][kTile][4];
    float warp_max[kScoreWarps][kRows], warp_sum[kScoreWarps][kRows];
    unsigned char exists[kStages][kTile];
  };

  const BatchMlaParams& params;
  Shared& shared;
  const int warp, lane;

  FI_DEVICE MlaMmaKernel(const BatchMlaParams& p, Shared& s)
      : params(p), shared(s), warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)), lane(threadIdx.x % 32) {}

  FI_DEVICE void run() const {
    pdl_wait();
    if (static_cast<int>(blockIdx.x) >= params.view().header().ranges) return;
    MlaScheduler scheduler;
    scheduler.enter(params.view(), blockIdx.x);
    consume(scheduler);
  }

 private:
  FI_DEVICE void meet() const { barrier_sync(1, kThreads); }

  FI_DEVICE int rope_bytes() const { return kMlaRope * (params.wide_rope ? 2 : static_cast<int>(sizeof(KV))); }
  FI_DEVICE const char* ckv_row(int page, int slot) const {
    return static_cast<const char*>(params.ckv) + params.ckv_offset(page, slot) * sizeof(KV);
  }
  FI_DEVICE const char* kpe_row(int page, int slot) const {
    return static_cast<const char*>(params.kpe) + params.kpe_offset(page, slot) * (rope_bytes() / kMlaRope);
  }
  FI_DEVICE const float* scales_row(int page, int slot) const {
    return params.ckv_scales + page * params.scales_page + slot * params.scales_token;
  }
  struct Place {
    int page, slot;  // page -1: no token
  };
  FI_DEVICE Place place(const MlaWorkTile& s, int key, int high) const {
    if (key >= high) return {-1, 0};
    const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.page_size));
    return {params.page(s.request.first_page + index), key - index * static_cast<int>(params.page_size.value)};
  }

  // By eight lanes: loads a row of a stage by cp.async. A key that does not exist becomes zeros.
  FI_DEVICE void load_row(const Place& at, int stage, int key, int chunk) const {
    const bool exists = at.page >= 0;
    char* row = shared.raw[stage] + key * kRawPitch;
    const char* ckv = ckv_row(exists ? at.page : 0, at.slot) + chunk * 16;
    const char* kpe = kpe_row(exists ? at.page : 0, at.slot) + chunk * 16;
#pragma unroll
    for (int i = 0; i < kLatentBytes; i += 128) cp_async_16(row + chunk * 16 + i, ckv + i, exists);
    if (chunk * 16 < rope_bytes()) cp_async_16(row + kLatentBytes + chunk * 16, kpe, exists && params.has_rope);
    if (kFp8 && params.ckv_scales && chunk == 0)
      cp_async_16(shared.scales[stage][key], scales_row(exists ? at.page : 0, at.slot), exists);
    if (chunk == 0) shared.exists[stage][key] = exists;
  }
  // By eight lanes, of which each dequantizes a chunk of 16 codes of every 128.
  FI_DEVICE void load_packed_row(int slot, int stage, int key, int chunk) const {
    const bool exists = slot >= 0;
    char* row = shared.raw[stage] + key * kRawPitch;
    const auto from = params.packed_row(exists ? slot : 0);
    const unsigned long long scales = exists ? *reinterpret_cast<const unsigned long long*>(from.scales) : 0;
#pragma unroll
    for (int i = 0; i < kMlaPackedCodes; i += 128) {
      const int column = i + chunk * 16;
      if (column >= kMlaPackedCodes) break;
      const uint4 raw = exists ? load_once(from.row + column, true) : uint4{0, 0, 0, 0};
      const float scale = mla_power_of_two(static_cast<unsigned>(scales >> (column / kMlaPackedGroup * 8)) & 0xff);
      const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
      unsigned pairs[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) pairs[k] = mla_scaled(words[k / 2], k % 2 ? kMlaUpper : kMlaLower, scale, T());
      uint4* to = reinterpret_cast<uint4*>(row + column * 2);
      to[0] = {pairs[0], pairs[1], pairs[2], pairs[3]}, to[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
    }
    cp_async_16(row + kMlaPackedCodes * 2 + chunk * 16, from.row + kMlaPackedCodes + chunk * 16, exists);
    cp_async_16(row + kMlaLatent * 2 + chunk * 16, from.row, false);  // no rotary part: zeros
    if (chunk == 0) shared.exists[stage][key] = exists;
  }
  FI_DEVICE void load_stage(const MlaWorkTile& s, int stage, int first, int high) const {
    const int key = threadIdx.x / 8;
    const Place at = place(s, first + key, high);
    if constexpr (kPacked)
      load_packed_row(at.page, stage, key, threadIdx.x % 8);
    else
      load_row(at, stage, key, threadIdx.x % 8);
  }

  // Queries of a work tile: to shared memory, then to registers as operands of all score steps.
  FI_DEVICE void load_queries(const MlaWorkTile& s, unsigned (&q)[kSteps][4]) const {
    const int rows = s.request.qo_len * static_cast<int>(params.heads.value), row0 = s.q_tile * kRows;
    for (int i = threadIdx.x; i < kRows * (kMlaWidth / 8); i += kThreads) {
      const int r = i / (kMlaWidth / 8), chunk = i % (kMlaWidth / 8);
      const bool latent = chunk < kMlaLatent / 8;
      const bool valid = row0 + r < rows && (latent || params.has_rope);
      const auto row = params.row(valid ? row0 + r : 0);
      const int64_t token = s.request.qo_begin + row.token;
      const T* from = latent ? static_cast<const T*>(params.q_nope) + token * params.q_nope_token +
                                   row.head * params.q_nope_head + chunk * 8
                             : static_cast<const T*>(params.q_pe) + token * params.q_pe_token +
                                   row.head * params.q_pe_head + (chunk - kMlaLatent / 8) * 8;
      cp_async_16(shared.q + r * kPitch + chunk * 16, from, valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    meet();
    if constexpr (kFp8) {
      // Thread t of four has columns 16 t .. 16 t + 15 of each 64, as one load brings them of fp8 keys: four at a step.
      const char* from = shared.q + lane / 4 * kPitch + lane % 4 * 32;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint2 x = *reinterpret_cast<const uint2*>(from + step / 4 * 128 + step % 4 * 8);
        const uint2 y = *reinterpret_cast<const uint2*>(from + step / 4 * 128 + step % 4 * 8 + 8 * kPitch);
        q[step][0] = x.x, q[step][1] = y.x, q[step][2] = x.y, q[step][3] = y.y;
      }
      if (params.wide_rope) {
        from = shared.q + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
        for (int step = kMlaLatent / 16; step < kSteps; ++step) ldmatrix_x4(q[step], from + step * 32);
      }
    } else {
      const char* from = shared.q + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) ldmatrix_x4(q[step], from + step * 32);
    }
  }

  struct State {
    float o[8][4];                 // 16 rows by 64 columns
    float row_max[2], row_sum[2];  // of rows lane / 4 and lane / 4 + 8; row_sum: this thread's part
    int end[2];                    // keys that the rows attend to
  };

  FI_DEVICE void consume(MlaScheduler& scheduler) const {
    unsigned q[kSteps][4];
    MlaWork s;
    unsigned used = 0;  // stages
    while (scheduler.next(s)) {
      const int row0 = s.q_tile * kRows, high = params.high(s, row0, kRows), begin = s.begin * kMlaKvTile;
      int loaded = begin;  // the next key to load
      const auto load_next = [&](unsigned stage) {
        if (loaded < high) load_stage(s, stage % kStages, loaded, high);
        loaded += kTile;
        cp_async_commit();
      };
      load_queries(s, q);  // all threads are done with the stages of the work tile before
#pragma unroll 1
      for (int i = 0; i < kStages - 1; ++i) load_next(used + i);
      State state;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state.end[h] = params.end_key(s.request, params.row(row0 + lane / 4 + 8 * h).token);
        state.row_max[h] = kMinusInf, state.row_sum[h] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[n][i] = 0.f;
#pragma unroll 1
      for (int key = begin; key < high; key += kTile, ++used) {
        meet();  // all threads are done with the stage that is filled next
        load_next(used + kStages - 1);
        cp_async_wait<kStages - 1>();
        meet();
        attend(state, q, key, used % kStages);
      }
      cp_async_wait<0>();
      store(s, state, row0);
      if (!s.is_whole()) {  // queries are in registers
        auto& scratch = *reinterpret_cast<typename Merge::Shared*>(shared.q);
        Merge{params, s, scratch, static_cast<int>(threadIdx.x), 0, 0}.run();
      }
    }
    pdl_launch_dependents();
  }

  // One KV tile: scores of eight keys by each score warp, softmax over all warps, then 64 columns of the output.
  FI_DEVICE void attend(State& state, const unsigned (&q)[kSteps][4], int tile, unsigned stage) const {
    const char* rows = shared.raw[stage];
    float score[4];
    const int mine = warp * 8 + lane % 4 * 2;  // this thread's two keys of the tile
    if (warp < kScoreWarps) {
      compute_scores(score, q, rows + warp * 8 * kRawPitch, stage, mine);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (tile + mine + i % 2 >= state.end[i / 2] || !shared.exists[stage][mine + i % 2]) score[i] = kMinusInf;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = fmaxf(score[2 * h], score[2 * h + 1]);
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        if (lane % 4 == 0) shared.warp_max[warp][lane / 4 + 8 * h] = top;
      }
    }
    meet();
    float alpha[2], base[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = state.row_max[h];
#pragma unroll
      for (int w = 0; w < kScoreWarps; ++w) top = fmaxf(top, shared.warp_max[w][lane / 4 + 8 * h]);
      base[h] = softmax_reference(top);
      alpha[h] = exp2_approx(state.row_max[h] - base[h]);
      state.row_max[h] = top;
      state.row_sum[h] *= alpha[h];
    }
    if (warp < kScoreWarps) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = exp2_approx(score[2 * h] - base[h]), y = exp2_approx(score[2 * h + 1] - base[h]);
        state.row_sum[h] += x + y;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          float fx = x, fy = y;
          if (kFp8 && params.ckv_scales) fx *= shared.scales[stage][mine][g], fy *= shared.scales[stage][mine + 1][g];
          *reinterpret_cast<unsigned*>(&shared.prob[g][lane / 4 + 8 * h][mine]) = pack_pair(fx, fy, T());
        }
      }
    }
    if (__any_sync(0xffffffffu, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[n][i] *= alpha[i / 2];
    }
    meet();
    const T* prob = shared.prob[kGroups > 1 ? warp / 2 : 0][lane % 16] + lane / 16 * 8;
    const int column = warp * 64 * static_cast<int>(sizeof(KV)) + lane / 16 * 16;  // bytes
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      unsigned a[4], b[4];
      ldmatrix_x4(a, prob + step * 16);
      const char* from = rows + (step * 16 + lane % 16) * kRawPitch + column;
      if constexpr (kFp8) {
        // A word has two columns of two keys: products of the even columns of 16, and of the odd ones.
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          ldmatrix_x4_trans(b, from + n * 16);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mma_m16n8k16(state.o[2 * (n + i)], a, dequantize(b[2 * i], kMlaEven), dequantize(b[2 * i + 1], kMlaEven),
                         T());
            mma_m16n8k16(state.o[2 * (n + i) + 1], a, dequantize(b[2 * i], kMlaOdd), dequantize(b[2 * i + 1], kMlaOdd),
                         T());
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          ldmatrix_x4_trans(b, from + n * 32);
          mma_m16n8k16(state.o[2 * n], a, b[0], b[1], T());
          mma_m16n8k16(state.o[2 * n + 1], a, b[2], b[3], T());
        }
      }
    }
  }
  FI_DEVICE static unsigned dequantize(unsigned word, unsigned selector) { return mla_dequantize(word, selector, T()); }

  // Scores of 16 rows with the eight keys from `keys` on; each 128 columns have a scale of their own.
  FI_DEVICE void compute_scores(float (&score)[4], const unsigned (&q)[kSteps][4], const char* keys, unsigned stage,
                                int mine) const {
    constexpr int kParts = 5, kPartSteps = 8;  // 4 times 128 columns, and the rope part
    float sums[kParts][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[part][i] = 0.f;
    if constexpr (kFp8) {
      const char* from = keys + lane / 4 * kRawPitch + lane % 4 * 16;
#pragma unroll
      for (int block = 0; block < 9; ++block) {
        const int at = block < 8 ? block % 4 * 2 + block / 4 : 8;  // independent chains side by side
        if (block == 8 && params.wide_rope) break;
        const uint4 x = *reinterpret_cast<const uint4*>(from + at * 64);
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int step = 0; step < 4; ++step)
          mma_m16n8k16(sums[at / 2], q[at * 4 + step], dequantize(words[step], kMlaLower),
                       dequantize(words[step], kMlaUpper), T());
      }
      if (params.wide_rope) {
        const char* rope = keys + lane % 8 * kRawPitch + kLatentBytes + lane / 8 * 16;
#pragma unroll
        for (int step = kMlaLatent / 16; step < kSteps; step += 2) {
          unsigned b[4];
          ldmatrix_x4(b, rope + (step * 32 - kMlaLatent * 2));
          mma_m16n8k16(sums[4], q[step], b[0], b[1], T());
          mma_m16n8k16(sums[4], q[step + 1], b[2], b[3], T());
        }
      }
    } else {
      const char* from = keys + lane % 8 * kPitch + lane / 8 * 16;
#pragma unroll
      for (int step = 0; step < kPartSteps; step += 2)  // independent chains side by side
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int at = part * kPartSteps + step;
          if (at >= kSteps) continue;
          unsigned b[4];
          ldmatrix_x4(b, from + at * 32);
          mma_m16n8k16(sums[part], q[at], b[0], b[1], T());
          mma_m16n8k16(sums[part], q[at + 1], b[2], b[3], T());
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = 0.f;
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        float factor = 1.f;
        if (kFp8 && params.ckv_scales) factor = shared.scales[stage][mine + i % 2][g];
        sum += factor * sums[g][i];
      }
      sum += kFp8 ? params.rope_factor * sums[4][i] : sums[4][i];
      score[i] = sum * params.score_factor();
    }
  }

  // The epilogue: the output, or the partial of a split.
  FI_DEVICE void store(const MlaWork& s, State& state, int row0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = state.row_sum[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (warp < kScoreWarps && lane % 4 == 0) shared.warp_sum[warp][lane / 4 + 8 * h] = sum;
    }
    meet();
    const int count = s.request.qo_len * static_cast<int>(params.heads.value);
    if constexpr (kMlaFixedSplits)
      if (s.folds()) {
        fold(s, state, 0), fold(s, state, 1);
        meet();  // all threads have read the states
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int place = lane / 4 + 8 * h;
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kScoreWarps; ++w) total += shared.warp_sum[w][place];
      if constexpr (kMlaFixedSplits) total = s.folds() ? state.row_sum[h] : total;
      const int column = warp * 64 + lane % 4 * (kFp8 ? 4 : 2);
      if (s.is_whole()) {
        if (row0 + place >= count) continue;
        const auto at = params.row(row0 + place);
        const int64_t token = s.request.qo_begin + at.token;
        T* out = static_cast<T*>(params.out) + token * params.out_token + at.head * params.out_head + column;
        const bool leads = warp == 0 && lane % 4 == 0;
        if (params.score_stats && leads) params.write_stats<CudaMath>(token, at.head, state.row_max[h], total);
        const float factor = params.finish<CudaMath>(at.head, state.row_max[h], total);
        each_pair(state, h, [&](int x, float low, float high) {
          *reinterpret_cast<unsigned*>(out + x) = pack_pair(low * factor, high * factor, T());
        });
        if (params.lse && leads) params.write_lse<CudaMath>(token, at.head, state.row_max[h], total);
      } else {
        float* out = params.partial_output(s.partial()) + static_cast<int64_t>(place) * kMlaLatent + column;
        each_pair(state, h, [&](int x, float low, float high) {
          store_global(out + x, make_uint2(__float_as_uint(low), __float_as_uint(high)));
        });
        if (warp == 0 && lane % 4 == 0)
          reinterpret_cast<float2*>(params.partial_states(s.partial()))[place] = make_float2(state.row_max[h], total);
      }
    }
  }
  // Adds the state of the chunks before to this thread's columns of row lane / 4 + 8 h. row_sum is then the whole sum.
  FI_DEVICE void fold(const MlaWork& s, State& state, int h) const {
    const int place = lane / 4 + 8 * h, column = warp * 64 + lane % 4 * (kFp8 ? 4 : 2);
    float row_sum = 0.f;
#pragma unroll
    for (int w = 0; w < kScoreWarps; ++w) row_sum += shared.warp_sum[w][place];
    const float2 before = __ldcg(reinterpret_cast<const float2*>(params.partial_states(s.partial())) + place);
    const auto fold = mla_fold<CudaMath>(before.x, before.y, state.row_max[h], row_sum);
    state.row_max[h] = fold.row_max, state.row_sum[h] = fold.row_sum;
    const float* from = params.partial_output(s.partial()) + static_cast<int64_t>(place) * kMlaLatent + column;
    each_pair(state, h, [&](int x, float& low, float& high) {
      const float2 sums = __ldcg(reinterpret_cast<const float2*>(from + x));
      low = fold.value(sums.x, low), high = fold.value(sums.y, high);
    });
  }
  // f(x, low, high) for the pairs of neighbouring columns x and x + 1 of a row, from this thread's first column on.
  template <class F>
  FI_DEVICE static void each_pair(State& state, int h, F&& f) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if constexpr (kFp8) {  // even columns in one accumulator, odd ones in the next
        float (&even)[4] = state.o[n / 2 * 2], (&odd)[4] = state.o[n / 2 * 2 + 1];
        f(n / 2 * 16 + n % 2 * 2, even[2 * h + n % 2], odd[2 * h + n % 2]);
      } else {
        f(n * 8, state.o[n][2 * h], state.o[n][2 * h + 1]);
      }
    }
  }
};

template <class T, class KV, int kStages, int kSharedBytes>
FI_DEVICE void batch_mla_mma(const BatchMlaParams& params) {
  run_in_shared<MlaMmaKernel<T, KV, kStages>, 128, kSharedBytes>(params);
}
template <int kStages, int kSharedBytes>
FI_DEVICE void batch_mla_packed(const BatchMlaParams& params) {
  run_in_shared<MlaMmaKernel<__nv_bfloat16, __nv_bfloat16, kStages, true>, 128, kSharedBytes>(params);
}

}  // namespace fi
