// Batch MLA on sm_80 and later for narrow q tiles: 16 packed query rows in registers, mma.sync. Eight warps share a KV
// tile: each computes the scores of eight keys, then multiplies all probabilities with 64 of the 512 columns.
#pragma once
#include "fi/attention/mla/batch_mla.h"
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
#if __CUDA_ARCH__ >= 900
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#endif

namespace fi {

// A pair of e4m3, each the upper byte of a half, to bf16 or half, exactly: exponent and mantissa move into place and a
// multiplication corrects the bias. NaN becomes 480 times the sign.
FI_DEVICE unsigned mla_widen(unsigned spread, __nv_bfloat16) {
  const unsigned bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 4);
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(bits), "r"(0x7b807b80u), "r"(0x80008000u));  // 2^120
  return y;
}
FI_DEVICE unsigned mla_widen(unsigned spread, __half) {
  const unsigned bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  unsigned y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(bits), "r"(0x5c005c00u));  // 2^8
  return y;
}

// A KV tile has kTile keys in stages of kStageKeys. Rows are loaded by cp.async, so pages may have any size: by a
// producer warpgroup if kProducer (Hopper), otherwise by the consumers. NOTE: a bulk copy for each row takes no
// registers or addresses, but an SM begins one in 65 cycles: H200, b64 kv8k h16 304 us, by cp.async 171.
template <class T, class KV, int kTile, int kStages, bool kProducer>
struct MlaMmaKernel {
  static constexpr int kRows = 16, kWarps = 8, kThreads = kWarps * 32, kStageKeys = 32, kParts = kTile / kStageKeys;
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kScoreWarps = kTile / 8;
  static constexpr int kPitch = kMlaWidth * 2 + 16;  // bytes of a row in 16 bits; an odd number of 16-byte chunks
  static constexpr int kRawPitch = kFp8 ? kMlaWidth + 16 : kPitch;
  static constexpr int kGroups = kFp8 ? 4 : 1;  // probabilities: times the scale of each 128 columns
  static constexpr int kProbPitch = kTile + 8;
  static constexpr int kLatentBytes = kMlaLatent * sizeof(KV), kRopeBytes = kMlaRope * sizeof(KV);
  static constexpr int kSteps = kMlaWidth / 16;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of three warpgroups

  struct Shared {
    alignas(16) char raw[kStages][kStageKeys * kRawPitch];
    alignas(16) char q[kRows * kPitch];
    alignas(16) T prob[kGroups][kRows][kProbPitch];
    alignas(16) float scales[kFp8 ? kStages : 1][kStageKeys][4];
    float warp_max[kScoreWarps][kRows], warp_sum[kScoreWarps][kRows];
    unsigned char exists[kStages][kStageKeys];
#if __CUDA_ARCH__ >= 900
    Pipeline<kStages> pipeline;
#endif
  };

  const BatchMlaParams& params;
  Shared& shared;
  const int warp, lane;

  FI_DEVICE MlaMmaKernel(const BatchMlaParams& p, Shared& s)
      : params(p), shared(s), warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)), lane(threadIdx.x % 32) {}

  FI_DEVICE void run() const {
#if __CUDA_ARCH__ >= 900
    if (kProducer) {
      if (threadIdx.x == 0) {
        shared.pipeline.init(128 + 4, kWarps);
        fence_barrier_init();
      }
      __syncthreads();
    }
#endif
    pdl_wait();
    if (static_cast<int>(blockIdx.x) >= params.view().header().ranges) return;
    MlaTileScheduler scheduler;
    scheduler.enter(params.view(), blockIdx.x);
    if (kProducer && warp >= kWarps) {
#if __CUDA_ARCH__ >= 900
      give_registers<kProducerRegisters>();
      produce(scheduler);
    } else if (kProducer) {
      take_registers<kConsumerRegisters>();
      consume(scheduler);
#endif
    } else {
      consume(scheduler);
    }
  }

 private:
  FI_DEVICE void meet() const { barrier_sync(1, kThreads); }

  FI_DEVICE const char* ckv_row(int page, int slot) const {
    return static_cast<const char*>(params.ckv) + params.ckv_offset(page, slot) * sizeof(KV);
  }
  FI_DEVICE const char* kpe_row(int page, int slot) const {
    return static_cast<const char*>(params.kpe) + params.kpe_offset(page, slot) * sizeof(KV);
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

#if __CUDA_ARCH__ >= 900
  // By the producer warpgroup.
  FI_DEVICE void produce(MlaTileScheduler& scheduler) const {
    MlaWorkTile s;
    auto at = PipelineState::producer();
    const int thread = threadIdx.x - kThreads, key = thread / 8;
    while (scheduler.next(s)) {
      const int high = params.high(s, s.q_tile * kRows, kRows);
      Place now[2], next[2];
      const auto look_up = [&](int first, Place(&places)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) places[i] = place(s, first + key + 16 * i, high);
      };
      look_up(s.begin * kMlaKvTile, now);
      for (int tile = s.begin * kMlaKvTile; tile < high; tile += kTile) {
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
          look_up(tile + (part + 1) * kStageKeys, next);
          shared.pipeline.acquire(at);
#pragma unroll
          for (int i = 0; i < 2; ++i) load_row(now[i], at.stage, key + 16 * i, thread % 8);
          shared.pipeline.commit_copies(at.stage);
          __syncwarp();
          if (lane == 0) shared.pipeline.commit(at.stage);  // of `exists`
          now[0] = next[0], now[1] = next[1];
          at.advance(kStages);
        }
      }
    }
    pdl_launch_dependents();
  }
#else
  FI_DEVICE void produce(MlaTileScheduler&) const {}
#endif

  // By eight lanes: loads a row of a stage by cp.async. A key that does not exist becomes zeros.
  FI_DEVICE void load_row(const Place& at, int stage, int key, int chunk) const {
    const bool exists = at.page >= 0;
    char* row = shared.raw[stage] + key * kRawPitch;
    const char* ckv = ckv_row(exists ? at.page : 0, at.slot) + chunk * 16;
    const char* kpe = kpe_row(exists ? at.page : 0, at.slot) + chunk * 16;
#pragma unroll
    for (int i = 0; i < kLatentBytes; i += 128) cp_async_16(row + chunk * 16 + i, ckv + i, exists);
    if (chunk * 16 < kRopeBytes) cp_async_16(row + kLatentBytes + chunk * 16, kpe, exists && params.has_rope);
    if (kFp8 && params.ckv_scales && chunk == 0)
      cp_async_16(shared.scales[stage][key], scales_row(exists ? at.page : 0, at.slot), exists);
    if (chunk == 0) shared.exists[stage][key] = exists;
  }
  // By the consumers, where they load.
  FI_DEVICE void load_stage(const MlaWorkTile& s, int stage, int first, int high) const {
    const int key = threadIdx.x / 8;
    load_row(place(s, first + key, high), stage, key, threadIdx.x % 8);
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

  FI_DEVICE void consume(MlaTileScheduler& scheduler) const {
    unsigned q[kSteps][4];
    MlaWorkTile s;
    unsigned used = 0;  // stages
    while (scheduler.next(s)) {
      const int row0 = s.q_tile * kRows, high = params.high(s, row0, kRows), begin = s.begin * kMlaKvTile;
      int loaded = begin;  // cp.async: the next key to load
      const auto load_next = [&](unsigned stage) {
        if (loaded < high) load_stage(s, stage % kStages, loaded, high);
        loaded += kStageKeys;
        cp_async_commit();
      };
      load_queries(s, q);  // all threads are done with the stages of the work tile before
      if (!kProducer) {
#pragma unroll 1
        for (int i = 0; i < kStages - kParts; ++i) load_next(used + i);
      }
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
      for (int key = begin; key < high; key += kTile) {
        const char* rows[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const unsigned stage = (used + part) % kStages;
          rows[part] = shared.raw[stage];
#if __CUDA_ARCH__ >= 900
          if (kProducer) shared.pipeline.wait(PipelineState::consumer_at<kStages>(used + part));
#endif
        }
        if (!kProducer) {
          meet();  // all threads are done with the stages that are filled next
#pragma unroll
          for (int part = 0; part < kParts; ++part) load_next(used + kStages - kParts + part);
          cp_async_wait<kStages - kParts>();
          meet();
        }
        attend(state, q, rows, key, used);
#if __CUDA_ARCH__ >= 900
        if (kProducer) {
          __syncwarp();
          if (lane == 0)
            for (int part = 0; part < kParts; ++part) shared.pipeline.release((used + part) % kStages);
        }
#endif
        used += kParts;
      }
      if (!kProducer) cp_async_wait<0>();
      store(s, state, row0);
    }
    if (!kProducer) pdl_launch_dependents();
  }

  // One KV tile: scores of eight keys by each score warp, softmax over all warps, then 64 columns of the output.
  FI_DEVICE void attend(State& state, const unsigned (&q)[kSteps][4], const char* const (&rows)[kParts], int tile,
                        unsigned used) const {
    float score[4];
    const int mine = warp * 8 + lane % 4 * 2;  // this thread's two keys of the tile
    if (warp < kScoreWarps) {
      const unsigned stage = (used + warp / 4) % kStages;
      compute_scores(score, q, rows[kParts > 1 ? warp / 4 : 0] + warp % 4 * 8 * kRawPitch, stage, mine % kStageKeys);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (tile + mine + i % 2 >= state.end[i / 2] || !shared.exists[stage][mine % kStageKeys + i % 2])
          score[i] = kMinusInf;
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
          if (kFp8 && params.ckv_scales) {
            const unsigned stage = (used + warp / 4) % kStages;
            fx *= shared.scales[stage][mine % kStageKeys][g], fy *= shared.scales[stage][mine % kStageKeys + 1][g];
          }
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
      const char* from = rows[step / 2] + (step % 2 * 16 + lane % 16) * kRawPitch + column;
      if constexpr (kFp8) {
        // A word has two columns of two keys: products of the even columns of 16, and of the odd ones.
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          ldmatrix_x4_trans(b, from + n * 16);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mma_m16n8k16(state.o[2 * (n + i)], a, even(b[2 * i]), even(b[2 * i + 1]), T());
            mma_m16n8k16(state.o[2 * (n + i) + 1], a, odd(b[2 * i]), odd(b[2 * i + 1]), T());
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
  FI_DEVICE static unsigned even(unsigned quad) { return mla_widen(__byte_perm(quad, 0, 0x2404), T()); }
  FI_DEVICE static unsigned odd(unsigned quad) { return mla_widen(__byte_perm(quad, 0, 0x3414), T()); }

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
        const uint4 x = *reinterpret_cast<const uint4*>(from + at * 64);
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int step = 0; step < 4; ++step)
          mma_m16n8k16(sums[at / 2], q[at * 4 + step], mla_widen(__byte_perm(words[step], 0, 0x1404), T()),
                       mla_widen(__byte_perm(words[step], 0, 0x3424), T()), T());
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
      score[i] = sum * params.score_scale;
    }
  }

  // The epilogue: the output, or the partial of a split.
  FI_DEVICE void store(const MlaWorkTile& s, const State& state, int row0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = state.row_sum[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (warp < kScoreWarps && lane % 4 == 0) shared.warp_sum[warp][lane / 4 + 8 * h] = sum;
    }
    meet();
    const int count = s.request.qo_len * static_cast<int>(params.heads.value);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int place = lane / 4 + 8 * h;
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kScoreWarps; ++w) total += shared.warp_sum[w][place];
      const int column = warp * 64 + lane % 4 * (kFp8 ? 4 : 2);
      if (s.is_whole()) {
        if (row0 + place >= count) continue;
        const auto at = params.row(row0 + place);
        const int64_t token = s.request.qo_begin + at.token;
        T* out = static_cast<T*>(params.out) + token * params.out_token + at.head * params.out_head + column;
        const float factor = inverse_row_sum(total) * params.out_scale;
        each_pair(state, h, [&](int x, float low, float high) {
          *reinterpret_cast<unsigned*>(out + x) = pack_pair(low * factor, high * factor, T());
        });
        if (params.lse && warp == 0 && lane % 4 == 0)
          params.lse[token * params.heads.value + at.head] =
              softmax_lse<CudaMath>(state.row_max[h], total) * params.lse_factor;
      } else {
        float* out = params.partial_output(s.partial) + static_cast<int64_t>(place) * kMlaLatent + column;
        each_pair(state, h, [&](int x, float low, float high) {
          store_global(out + x, make_uint2(__float_as_uint(low), __float_as_uint(high)));
        });
        if (warp == 0 && lane % 4 == 0)
          reinterpret_cast<float2*>(params.partial_states(s.partial))[place] = make_float2(state.row_max[h], total);
      }
    }
  }
  // f(x, low, high) for the pairs of neighbouring columns x and x + 1 of a row, from this thread's first column on.
  template <class F>
  FI_DEVICE static void each_pair(const State& state, int h, F&& f) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if constexpr (kFp8) {  // even columns in one accumulator, odd ones in the next
        const float (&even)[4] = state.o[n / 2 * 2], (&odd)[4] = state.o[n / 2 * 2 + 1];
        f(n / 2 * 16 + n % 2 * 2, even[2 * h + n % 2], odd[2 * h + n % 2]);
      } else {
        f(n * 8, state.o[n][2 * h], state.o[n][2 * h + 1]);
      }
    }
  }
};

template <class T, class KV, int kTile, int kStages, bool kProducer, int kSharedBytes>
FI_DEVICE void batch_mla_mma(const BatchMlaParams& params) {
  run_in_shared<MlaMmaKernel<T, KV, kTile, kStages, kProducer>, 128, kSharedBytes>(params);
}

}  // namespace fi
