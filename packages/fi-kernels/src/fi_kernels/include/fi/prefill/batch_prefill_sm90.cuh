// Batch prefill on Hopper: persistent blocks of a scheduler warp, producer warps for q, k and v (TMA), and two consumer
// warpgroups (wgmma), where the softmax of a key tile runs while the products of its neighbours do.
#pragma once
#include "fi/attention/softmax.h"
#include "fi/cuda/convert.cuh"
#include "fi/cuda/exchange.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/barrier.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/warpgroup_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/prefill/producers_sm90.cuh"

namespace fi {

// Rows r = token * group + head of the group: a tile reads each key once for all heads that share it.
// kBytes: of shared memory for tiles.
template <class T, int kDimQK, int kDimVO, int kKeys, bool kWholeRows, bool kCapped, int kBytes = 226 * 1024>
struct PrefillKernel {
  static constexpr int kRows = 128, kStages = 2, kConsumers = 2, kThreads = 384;
  static constexpr int kProducerRegisters = kDimVO > 128 ? 40 : 56, kConsumerRegisters = kDimVO > 128 ? 232 : 224;
  // A block begins with 168 registers a thread; more would wait for ever.
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "registers");

  // Two tiles of queries where they fit: one group then begins its next tile while the other ends the last.
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
    Work work[2];
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
    if (threadIdx.x < 128) {
      give_registers<kProducerRegisters>();
      const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      const Producers producers{p, shared};
      if (warp == 0)
        producers.template produce<kDimQK>(p.k, shared.k, shared.k_full, shared.k_empty);
      else if (warp == 1)
        producers.template produce<kDimVO>(p.v, shared.v, shared.v_full, shared.v_empty);
      else if (warp == 2 && threadIdx.x % 32 == 0)
        producers.produce_queries();
      else if (warp == 3 && threadIdx.x % 32 == 0)
        producers.schedule();
    } else {
      take_registers<kConsumerRegisters>();
      consume(threadIdx.x / 128 - 1);
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

  FI_DEVICE void consume(int group) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    float o[kDimVO / 2], s[kKeys / 2];
    unsigned weights[kKeys / 16][4];
    const uint64_t k = wgmma_operand(shared.k, kKeyGroup);
    const uint64_t v = wgmma_operand(shared.v, kValueGroup, kBlockBytes);
    int stage = 0, parity = 0;
    if (group == 1) barrier_arrive(1, 256);  // the first turn is the first group's
    for (int use = 0;; ++use) {
      shared.work_full[use % 2].wait(use / 2 % 2);
      const Tile tile(p, shared.work[use % 2]);
      if (tile.tokens == 0) break;
      const int q_stage = use % kQueryStages;
      shared.q_full[q_stage].wait(use / kQueryStages % 2);
      const uint64_t q = wgmma_uniform(wgmma_operand(shared.q[q_stage] + group * 64 * 64, 1024));
      const int row = group * 64 + warp * 16 + lane / 4;  // and row + 8
      int first_key[2], end_key[2];
      for (int h = 0; h < 2; ++h) {
        const int token = tile.token + static_cast<int>(divide(row + 8 * h, p.group));
        first_key[h] = tile.mask.first_key(token);
        end_key[h] = tile.mask.end_key(token);
      }
      // Tiles all of whose keys every row sees: below the first row's end, at or above the last row's beginning.
      const int clear_end = tile.mask.end_key(tile.token) / kKeys;
      const int clear_begin = (tile.mask.first_key(tile.token + tile.tokens - 1) + kKeys - 1) / kKeys;
      float m[2] = {kMinusInf, kMinusInf}, d[2] = {0.f, 0.f}, alpha[2];
      const auto weigh = [&](int j, bool hidden) {
        if (kCapped) {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) s[i] = CudaMath::tanh(s[i] * p.scale);
        }
        if (hidden) hide(s, j * kKeys + lane % 4 * 2, first_key, end_key);
        softmax(s, m, d, alpha);
      };
      const int count = __shfl_sync(0xffffffffu, tile.count, 0);  // known to be uniform: wgmma need not be serialised
      if (count > 0) {
        int j = tile.begin + count - 1;
        shared.k_full[stage].wait(parity);
        barrier_sync(1 + group, 256);
        multiply_keys(s, q, wgmma_uniform(wgmma_further(k, stage * sizeof(shared.k[0]))));
        barrier_arrive(2 - group, 256);
        wgmma_wait<0>();
        wgmma_keep(s);
        if (thread == 0) shared.k_empty[stage].arrive();
        weigh(j, true);
        pack(s, weights);
        shared.v_full[stage].wait(parity);
        if (tile.request.kv_len < (j + 1) * kKeys) {
          clear(shared.v[stage], tile.request.kv_len - j * kKeys, 3 + group);
        }
#pragma unroll
        for (int i = 0; i < kDimVO / 2; ++i) o[i] = 0.f;
        // Products of the keys of tile j and of the values of tile j + 1 run during the softmax of their neighbours.
        // NOTE: no branch in between, else the compiler waits for both products at once; hence a loop of its own for
        // tiles that need no mask.
        const auto advance = [&](bool hidden) {
          const int v_stage = stage;
          if (++stage == kStages) stage = 0, parity ^= 1;
          --j;
          shared.k_full[stage].wait(parity);
          barrier_sync(1 + group, 256);
          const uint64_t keys = wgmma_uniform(wgmma_further(k, stage * sizeof(shared.k[0])));
          const uint64_t values = wgmma_uniform(wgmma_further(v, v_stage * sizeof(shared.v[0])));
          multiply_keys(s, q, keys);
          multiply_values(o, weights, values);
          barrier_arrive(2 - group, 256);
          wgmma_wait<1>();
          wgmma_keep(s);
          if (thread == 0) shared.k_empty[stage].arrive();
          weigh(j, hidden);
          wgmma_keep(s);
          shared.v_full[stage].wait(parity);  // NOTE: here, since this loop keeps the softmax above the wait
          wgmma_wait<0>();
          wgmma_keep(o);
          if (thread == 0) shared.v_empty[v_stage].arrive();
#pragma unroll
          for (int i = 0; i < kDimVO / 2; ++i) o[i] *= alpha[i / 2 % 2];
          pack(s, weights);
        };
        while (j > tile.begin && j > clear_end) advance(true);
        while (j > tile.begin && j > clear_begin) advance(false);
        while (j > tile.begin) advance(true);
        if (thread == 0) shared.q_empty[q_stage].arrive();
        multiply_values(o, weights, wgmma_uniform(wgmma_further(v, stage * sizeof(shared.v[0]))));
        wgmma_wait<0>();
        wgmma_keep(o);
        if (thread == 0) shared.v_empty[stage].arrive();
        if (++stage == kStages) stage = 0, parity ^= 1;
      } else {
        if (thread == 0) shared.q_empty[q_stage].arrive();
#pragma unroll
        for (int i = 0; i < kDimVO / 2; ++i) o[i] = 0.f;
      }
      store(shared.work[use % 2], o, m, d, row, lane);
      barrier_sync(3 + group, 128);
      if (thread == 0) shared.work_empty[use % 2].arrive();
    }
  }

 private:
  // Bytes between groups of 8 rows, and between blocks of 64 columns, of keys and values.
  static constexpr unsigned kKeyGroup = kWholeRows ? kDimQK * 16 : 1024, kValueGroup = kWholeRows ? kDimVO * 16 : 1024;
  static constexpr unsigned kBlockBytes = kWholeRows ? 1024 : kKeys * 128;

  FI_DEVICE static void multiply_keys(float (&s)[kKeys / 2], uint64_t q, uint64_t k) {
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kDimQK / 64; ++block)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma_m64k16(s, wgmma_further(q, block * kRows * 128 + step * 32),
                     wgmma_further(k, block * kBlockBytes + step * 32), block + step > 0, T());
    wgmma_commit();
  }

  FI_DEVICE static void multiply_values(float (&o)[kDimVO / 2], const unsigned (&weights)[kKeys / 16][4], uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      wgmma_m64k16(o, weights[step], wgmma_further(v, step * 2 * kValueGroup), true, T());
    wgmma_commit();
  }

  FI_DEVICE static void hide(float (&s)[kKeys / 2], int column, const int (&first)[2], const int (&end)[2]) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int key = column + i / 4 * 8 + i % 2, h = i / 2 % 2;
      if (key < first[h] || key >= end[h]) s[i] = kMinusInf;
    }
  }

  // Scores become weights, relative to the new maxima m; alpha is what earlier sums must be multiplied by. d holds this
  // thread's part of the sum.
  FI_DEVICE void softmax(float (&s)[kKeys / 2], float (&m)[2], float (&d)[2], float (&alpha)[2]) const {
    const float scale = kCapped ? p.cap : p.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = m[h], other = kMinusInf;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        top = fmaxf(top, s[4 * i + 2 * h]);
        other = fmaxf(other, s[4 * i + 2 * h + 1]);
      }
      top = fmaxf(top, other);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float base = softmax_base(top) * scale;
      alpha[h] = exp2_approx(fmaf(m[h], scale, -base));
      m[h] = top;
      float sum = 0.f, sum1 = 0.f;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        float& x = s[4 * i + 2 * h];
        float& y = s[4 * i + 2 * h + 1];
        x = exp2_approx(fmaf(x, scale, -base));
        y = exp2_approx(fmaf(y, scale, -base));
        sum += x;
        sum1 += y;
      }
      d[h] = d[h] * alpha[h] + (sum + sum1);
    }
  }

  FI_DEVICE static void pack(const float (&s)[kKeys / 2], unsigned (&weights)[kKeys / 16][4]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
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

  // Zeros value rows from `first` on: what lies beyond the last key may be NaN. Both groups do it, for themselves.
  FI_DEVICE static void clear(T* v, int first, int barrier) {
    constexpr int kPieces = kDimVO / 8;
    for (int i = first * kPieces + threadIdx.x % 128; i < kKeys * kPieces; i += 128) {
      const int key = i / kPieces, piece = i % kPieces;
      char* row = reinterpret_cast<char*>(v) + key / 8 * kValueGroup + key % 8 * 128;
      *reinterpret_cast<uint4*>(row + piece / 8 * kBlockBytes + piece % 8 * 16) = uint4{0, 0, 0, 0};
    }
    fence_async_shared();
    barrier_sync(barrier, 128);
  }

  FI_DEVICE void store(const Work& work, float (&o)[kDimVO / 2], float (&m)[2], float (&d)[2], int first,
                       int lane) const {
    const float scale = kCapped ? p.cap : p.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      d[h] += __shfl_xor_sync(0xffffffffu, d[h], 1);
      d[h] += __shfl_xor_sync(0xffffffffu, d[h], 2);
      const int row = first + 8 * h, token = divide(row, p.group);
      const int head = work.kv_head * p.group.value + row - token * p.group.value;
      const bool kept = token < work.tokens;
      float top = m[h] * scale, factor = p.out_scale;
      if (p.sinks && kept) {
        const float sink = p.sinks[head] * kLog2e, most = fmaxf(top, sink);
        d[h] = d[h] * exp2_approx(top - most) + exp2_approx(sink - most);
        factor *= exp2_approx(top - most);
        top = most;
      }
      factor *= softmax_inverse(d[h]);
      const int64_t at = work.request.qo_begin + work.token + token;
      if (p.lse && lane % 4 == 0 && kept) p.lse[at * p.qo_heads + head] = softmax_lse<CudaMath>(top, d[h]);
      T* out = static_cast<T*>(p.out) + at * p.out_token + head * p.out_head + lane % 4 * 8;
#pragma unroll
      for (int block = 0; block < kDimVO / 8; block += 4) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = o + (block + i) * 4 + 2 * h;
          x[i] = pack(pair[0] * factor, pair[1] * factor);
        }
        const uint4 piece = transpose_of_four(x);
        if (kept) store_global(out + block * 8, piece);
      }
    }
  }

  static constexpr bool kIsHalf = IsHalf<T>::value;
};

template <class T, int kDimQK, int kDimVO, int kKeys, bool kWholeRows, bool kCapped, int kSharedBytes>
FI_DEVICE void batch_prefill(const BatchPrefillParams& params) {
  extern __shared__ uint4 bytes[];
  using Kernel = PrefillKernel<T, kDimQK, kDimVO, kKeys, kWholeRows, kCapped>;
  static_assert(sizeof(typename Kernel::Shared) + 1024 <= kSharedBytes, "the family's Python says how much to ask for");
  const uint64_t address = (reinterpret_cast<uint64_t>(bytes) + 1023) & ~uint64_t{1023};
  Kernel(params, *reinterpret_cast<typename Kernel::Shared*>(address)).run();
}

}  // namespace fi
