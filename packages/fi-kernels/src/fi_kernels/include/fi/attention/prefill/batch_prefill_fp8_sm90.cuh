// Batch prefill of fp8 queries, keys and values on Hopper: the 16-bit kernel with warps that transpose values, because
// wgmma reads 8-bit operands K-major only (Shah et al. 2024, arXiv:2407.08608, section 3.3).
#pragma once
#include "fi/attention/prefill/online_softmax_sm90.cuh"
#include "fi/attention/prefill/tma_producer_sm90.cuh"
#include "fi/attention/softmax.h"
#include "fi/cuda/convert.cuh"
#include "fi/cuda/exchange.cuh"
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/ptx/global.cuh"
#include "fi/cuda/ptx/ldmatrix.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/wgmma_tile_sm90.cuh"

namespace fi {

// T: e4m3 or e5m2. Probabilities are rounded to e4m3 times 256, which keeps small ones; row_sum adds the unrounded
// ones. The tensor cores add with some 14 bits, so that a long sum would lose most of each new product (with equal
// weights and values, 16384 keys came out 24 % too small): the products of a key tile are summed by themselves.
template <class T, int kDimQK, int kDimVO, int kKeys, bool kCapped, int kConsumers>
struct PrefillFp8Kernel {
  static constexpr int kRows = 64 * kConsumers, kTransposers = 2;
  static constexpr int kPaddedQK = (kDimQK + 127) / 128 * 128, kPaddedVO = (kDimVO + 127) / 128 * 128;
  static constexpr int kQueryStages = kDimVO > 128 ? 1 : 2, kKeyStages = kPaddedQK > 128 ? 2 : 3, kValueStages = 2,
                       kColumnStages = kKeyStages;
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : 40, kConsumerRegisters = kConsumers > 2 ? 160 : 232;
  static_assert(registers_fit(kProducerRegisters + kConsumers * kConsumerRegisters, kConsumers + 1), "registers");
  static constexpr float kOffset = 8.f;  // log2 of the factor of probabilities; the largest e4m3 is 448
  static constexpr int kPartColumns = kDimVO < 128 ? kDimVO : 128;  // of one product, whose sum needs registers

  // Tiles in the 128-byte swizzle, [dim / 128][rows][128], where the last block may be partly used. Transposed values
  // in the 32-byte swizzle, [keys / 32][columns][32], with keys and columns in the order of `transpose`.
  struct Shared {
    alignas(1024) T q[kQueryStages][kRows * kPaddedQK];
    alignas(1024) T k[kKeyStages][kKeys * kPaddedQK];
    alignas(1024) T v[kValueStages][kKeys * kPaddedVO];
    alignas(1024) T columns[kColumnStages][kKeys * kDimVO];
    Pipeline<kQueryStages, Writer::kCopies, Reader::kProducts> q_pipeline;
    Pipeline<kKeyStages, Writer::kThreads, Reader::kProducts> k_pipeline;
    Pipeline<kValueStages, Writer::kThreads, Reader::kLoads> v_pipeline;
    Pipeline<kColumnStages, Writer::kThreads, Reader::kProducts> column_pipeline;
    Pipeline<2, Writer::kThreads, Reader::kLoads> work_pipeline;
    WorkTile work[2];
  };

  using Producers = PrefillProducers<Shared, T, kDimQK, kKeys, false>;
  using Tile = typename Producers::Tile;

  const BatchPrefillParams& p;
  Shared& shared;

  FI_DEVICE PrefillFp8Kernel(const BatchPrefillParams& params, Shared& s) : p(params), shared(s) {}

  FI_DEVICE void run() {
    if (threadIdx.x == 0) {
      shared.q_pipeline.init(1, kConsumers);
      shared.work_pipeline.init(1, kConsumers + 1 + kTransposers);
      shared.k_pipeline.init(1, kConsumers);
      shared.v_pipeline.init(p.copies.gathered ? 32 : 1, kTransposers);
      shared.column_pipeline.init(kTransposers, kConsumers);
      fence_barrier_init();
      prefetch_tensor_map(p.copies.q);
      prefetch_tensor_map(p.copies.k);
      prefetch_tensor_map(p.copies.v);
    }
    __syncthreads();
    pdl_wait();
    const int group = warpgroup_index();
    if (group == 0) {
      give_registers<kProducerRegisters>();
      const int warp = warp_index();
      const Producers producers{p, shared};
      if (warp == 0 && p.copies.gathered)
        gather(producers);
      else if (warp == 0)
        produce(producers);
      else if (warp == 3)
        producers.schedule(true);
      else
        transpose_all(warp - 1);
    } else {
      take_registers<kConsumerRegisters>();
      consume(group - 1);
    }
  }

 private:
  // Copies keys and values of every tile, last key tile first.
  FI_DEVICE void produce(const Producers& producers) const {
    producers.produce_pairs([&](const Tile& tile, int j, unsigned step, int2 box) {
      const auto k = PipelineState::producer_at<kKeyStages>(step);
      const auto v = PipelineState::producer_at<kValueStages>(step);
      shared.k_pipeline.acquire(k);
      producers.template copy_boxes<kPaddedQK, kKeys * 128>(p.copies.k, shared.k[k.stage],
                                                            shared.k_pipeline.full[k.stage], tile, j, box, false);
      shared.v_pipeline.acquire(v);
      producers.template copy_boxes<kPaddedVO, kKeys * 128>(p.copies.v, shared.v[v.stage],
                                                            shared.v_pipeline.full[v.stage], tile, j, box, true);
    });
  }
  // The same by cp.async. Transposers read values by plain loads, so only keys are passed on to another proxy.
  FI_DEVICE void gather(const Producers& producers) const {
    auto k = PipelineState::producer(), v = k;
    producers.for_each_tile([&](const Tile& tile) {
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j) {
        using Pages = typename Producers::template Pages<1>;
        const Pages pages(producers, tile, j, 0, false);
        shared.k_pipeline.acquire(k);
        producers.template gather_tile<kDimQK>(p.copies.k_rows, shared.k[k.stage], tile, j, pages);
        cp_async_commit();
        bool keys = true;
        Producers::acquire(shared.v_pipeline, v, keys, shared.k_pipeline.full[k.stage]);
        if constexpr (kSplitTables)
          producers.template gather_tile<kDimVO>(p.copies.v_rows, shared.v[v.stage], tile, j,
                                                 Pages(producers, tile, j, 0, true));
        else
          producers.template gather_tile<kDimVO>(p.copies.v_rows, shared.v[v.stage], tile, j, pages);
        shared.v_pipeline.commit_copies(v.stage);
        Producers::pass_on_previous(keys, shared.k_pipeline.full[k.stage]);
        k.advance(kKeyStages);
        v.advance(kValueStages);
      }
    });
  }

  FI_DEVICE void transpose_all(int part) const {
    const int lane = threadIdx.x % 32;
    unsigned step = 0;  // counts KV tiles of all work tiles
    Producers{p, shared}.for_each_tile([&](const Tile& tile) {
      for (int j = tile.begin + tile.count - 1; j >= tile.begin; --j, ++step) {
        const auto from = PipelineState::consumer_at<kValueStages>(step);
        const auto to = PipelineState::producer_at<kColumnStages>(step);
        shared.v_pipeline.wait(from);
        shared.column_pipeline.acquire(to);
        const int keys = tile.request.kv_len - tile.key(j);
        if (keys < kKeys)
          transpose<true>(shared.v[from.stage], shared.columns[to.stage], keys, part);
        else
          transpose<false>(shared.v[from.stage], shared.columns[to.stage], keys, part);
        pass_on_warp(shared.v_pipeline, from.stage, shared.column_pipeline, to.stage, lane);
      }
    });
  }

  // A warp transposes its part of the columns. Of 16 keys, number 2 t + 8 a + b (t < 4, a < 2, b < 2) becomes number 4
  // t + 2 a + b: the four that a thread has of a row of scores are then neighbours, which is the layout of a
  // register operand. Of 16 columns the even ones come first. Zeroes values from `keys` on: memory beyond the
  // last key may be NaN.
  template <bool kEnds>
  FI_DEVICE static void transpose(const T* values, T* columns, int keys, int part) {
    const int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    const char* from = reinterpret_cast<const char*>(values) + lane * 128;
    char* to = reinterpret_cast<char*>(columns) + matrix % 2 * 256 + row * 32 + ((matrix / 2) ^ (row / 4)) * 16;
#pragma unroll 1
    for (int step = 0; step < kKeys / 32; ++step) {
      unsigned seen[2];
      if (kEnds) {
        seen[0] = bytes_before(keys - step * 32 - lane % 4 * 2);
        seen[1] = bytes_before(keys - step * 32 - lane % 4 * 2 - 16);
      }
#pragma unroll
      for (int i = 0; i < kDimVO / 16 / kTransposers; ++i) {
        const int block = part * (kDimVO / 16 / kTransposers) + i;  // of 16 columns
        unsigned x[4], y[4];  // in x two keys of columns 2 i and 2 i + 1, in y four of one column
        ldmatrix_x4_trans(x, from + block / 8 * (kKeys * 128) + step * 32 * 128 + ((block % 8 ^ row) * 16));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          y[2 * h] = __byte_perm(x[2 * h], x[2 * h + 1], 0x6420);
          y[2 * h + 1] = __byte_perm(x[2 * h], x[2 * h + 1], 0x7531);
          if (kEnds) {
            y[2 * h] &= seen[h];
            y[2 * h + 1] &= seen[h];
          }
        }
        stmatrix_x4(to + step * 32 * kDimVO + block * 512, y);
      }
    }
  }
  // Of keys 0, 1, 8 and 9, those before `count`.
  FI_DEVICE static unsigned bytes_before(int count) {
    return (count > 0 ? 0xffu : 0u) | (count > 1 ? 0xff00u : 0u) | (count > 8 ? 0xff0000u : 0u) |
           (count > 9 ? 0xff000000u : 0u);
  }

  // The softmax of one warpgroup overlaps the products of the others, as in the 16-bit kernel.
  FI_DEVICE void consume(int group) const {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int row = group * 64 + thread / 32 * 16 + lane / 4;  // and row + 8
    const uint64_t k = wgmma_operand(shared.k, 1024), v = wgmma_operand(shared.columns, 256, 16, kWgmma32Bytes);
    float o[kDimVO / 2];
    unsigned step = 0;  // counts KV tiles of all work tiles
    for (int use = 0;; ++use) {
      const auto work_at = PipelineState::consumer_at<2>(use);
      shared.work_pipeline.wait(work_at);
      const Tile tile(p, shared.work[work_at.stage]);
      if (uniform(tile.tokens) == 0) break;
      const auto q_at = PipelineState::consumer_at<kQueryStages>(use);
      const uint64_t q = wgmma_uniform(wgmma_operand(shared.q[q_at.stage] + group * 64 * 128, 1024));
      // KV tiles without a masked key: below the first row's end, at or above the last row's beginning.
      const int clear_end = uniform((tile.mask.end_key(tile.token) - tile.origin) / kKeys);
      const int clear_begin =
          uniform((tile.mask.first_key(tile.token + tile.tokens - 1) - tile.origin + kKeys - 1) / kKeys);
      const int begin = uniform(tile.begin), end = begin + uniform(tile.count);
      float scale[2], row_max[2] = {kMinusInf, kMinusInf}, row_sum[2] = {0.f, 0.f}, alpha[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[h] = row_scale(p, tile.kv_head, row + 8 * h);
#pragma unroll
      for (int i = 0; i < kDimVO / 2; ++i) o[i] = 0.f;
      shared.q_pipeline.wait(q_at);
      for (int j = end - 1; j >= begin; --j, ++step) {
        const auto k_at = PipelineState::consumer_at<kKeyStages>(step);
        const auto column_at = PipelineState::consumer_at<kColumnStages>(step);
        float s[kKeys / 2], part[kPartColumns / 2];
        unsigned weights[kKeys / 32][4];
        shared.k_pipeline.wait(k_at);
        wgmma_shared<T, kDimQK>(s, q, kRows * 128, wgmma_uniform(wgmma_further(k, k_at.stage * sizeof(shared.k[0]))),
                                kKeys * 128);
        wgmma_finish(s);
        if (thread == 0) {  // order: group: as Pipeline::release_warpgroup, of both
          shared.k_pipeline.release(k_at.stage);
          if (j == begin) shared.q_pipeline.release(q_at.stage);
        }
        if (kCapped) {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) s[i] = CudaMath::tanh(s[i] * scale[i / 2 % 2]);
        }
        if (j < clear_begin || j >= clear_end)
          apply_mask(p, s, shared.work[work_at.stage], row, j * kKeys + lane % 4 * 2, p.problem.mask.window_left >= 0,
                     true);
        online_softmax(s, {kCapped ? p.copies.scores.cap : scale[0], kCapped ? p.copies.scores.cap : scale[1]}, kOffset,
                       {false, false}, row_max, row_sum, alpha);
        pack(s, weights);
        shared.column_pipeline.wait(column_at);
        const uint64_t columns = wgmma_uniform(wgmma_further(v, column_at.stage * sizeof(shared.columns[0])));
#pragma unroll
        for (int first = 0; first < kDimVO; first += kPartColumns) {
          wgmma_registers<__nv_fp8_e4m3, T>(part, weights, wgmma_further(columns, first * 32), 32 * kDimVO, false);
          wgmma_finish(part);
          if (first + kPartColumns == kDimVO) shared.column_pipeline.release_warpgroup(column_at.stage, thread);
#pragma unroll
          for (int i = 0; i < kPartColumns / 2; ++i)
            o[first / 2 + i] = fmaf(o[first / 2 + i], alpha[i / 2 % 2], part[i]);
        }
      }
      if (begin == end) shared.q_pipeline.release_warpgroup(q_at.stage, thread);
      store(shared.work[work_at.stage], o, row_max, row_sum, row, lane);
      warpgroup_sync(1 + group);
      if (thread == 0) shared.work_pipeline.release(work_at.stage);  // order: group: the warpgroup has met
    }
  }

  FI_DEVICE static void pack(const float (&s)[kKeys / 2], unsigned (&weights)[kKeys / 32][4]) {
#pragma unroll
    for (int k = 0; k < kKeys / 32; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = s + 16 * k + i / 2 * 8 + i % 2 * 2;
        weights[k][i] = e4m3_quad(x[0], x[1], x[4], x[5]);
      }
  }

  // A thread has columns 4 t to 4 t + 3 of each 16 (t = lane % 4), and stores 16 bytes at a time: of 16 bits two
  // threads exchange halves, of e4m3 four threads quarters.
  FI_DEVICE void store(const WorkTile& work, float (&o)[kDimVO / 2], const float (&row_max)[2],
                       const float (&row_sum)[2], int first, int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowEpilogue end(p, work, first + 8 * h, kOffset, row_max[h], row_sum[h]);
      const float factor = end.factor * value_scale(p, work.kv_head);
#pragma unroll
      for (int i = 2 * h; i < kDimVO / 2; i += i % 2 == 0 ? 1 : 3) o[i] *= factor;
      char* bytes = static_cast<char*>(p.problem.out) + end.begin;
      if (p.problem.out_type == OutType::kE4M3) {
        store_bytes(bytes, o, h, lane, end.exists, e4m3_quad);
        continue;
      }
      if (p.problem.out_type == OutType::kE5M2) {
        store_bytes(bytes, o, h, lane, end.exists, e5m2_quad);
        continue;
      }
      unsigned short* out = static_cast<unsigned short*>(p.problem.out) + end.begin;
#pragma unroll
      for (int block = 0; block < kDimVO / 16; block += 2) {
        const float *x = o + block * 8 + 2 * h, *y = x + 8;
        const unsigned x0 = pack_output(p, x[0], x[4]), x1 = pack_output(p, x[1], x[5]);
        const unsigned y0 = pack_output(p, y[0], y[4]), y1 = pack_output(p, y[1], y[5]);
        const bool odd = lane % 2;
        const unsigned other0 = __shfl_xor_sync(0xffffffffu, odd ? x0 : y0, 1);
        const unsigned other1 = __shfl_xor_sync(0xffffffffu, odd ? x1 : y1, 1);
        const uint4 piece = odd ? uint4{other0, other1, y0, y1} : uint4{x0, x1, other0, other1};
        if (end.exists) store_global(out + (block + lane % 2) * 16 + lane % 4 / 2 * 8, piece);
      }
    }
  }
  template <class Quad>
  FI_DEVICE static void store_bytes(char* out, const float (&o)[kDimVO / 2], int h, int lane, bool exists, Quad quad) {
#pragma unroll
    for (int block = 0; block < kDimVO / 16; block += 4) {
      unsigned x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* y = o + (block + i) * 8 + 2 * h;
        x[i] = quad(y[0], y[4], y[1], y[5]);
      }
      const uint4 piece = transpose_of_four(x);
      if (exists) store_global(out + (block + lane % 4) * 16, piece);
    }
  }
};

template <class T, int kDimQK, int kDimVO, int kKeys, bool kCapped, int kConsumers, int kSharedBytes>
FI_DEVICE void batch_prefill_wgmma_fp8(const BatchPrefillParams& params) {
  using Kernel = PrefillFp8Kernel<T, kDimQK, kDimVO, kKeys, kCapped, kConsumers>;
  run_in_shared<Kernel, kSwizzlePeriod, kSharedBytes>(params);
}

}  // namespace fi
