// Batch decode on sm_80 and later: on CUDA cores, for all types and head dims, and on tensor cores with cp.async.
#pragma once
#include "fi/attention/cuda_core_attention.cuh"
#include "fi/attention/decode/cuda_core_epilogue.cuh"
#include "fi/attention/decode/dynamic_scheduler.cuh"
#include "fi/attention/decode/scale_stages.cuh"
#include "fi/attention/decode/split_kv_epilogue.cuh"
#include "fi/attention/decode/warp_fp4_tile.cuh"
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"

namespace fi {

using CtaEpilogueThreads = EpilogueThreads<16>;  // one CTA merges up to 16 splits

// The tile scheduler of a CTA in shared memory. One thread advances it, which saves the others thirty registers.
struct CtaTileScheduler {
  DecodeTileScheduler scheduler;
  DecodeWorkTile work_tile;
  bool more;
  float bmm1;

  FI_DEVICE void begin(const BatchDecodeParams& params) {
    bmm1 = params.scales.bmm1 ? *params.scales.bmm1 : 1.f;
    scheduler.begin(params.schedule, blockIdx.x, params.queries());
  }
  // By all threads of the CTA, after the first has called begin. Also a barrier.
  FI_DEVICE bool next(const BatchDecodeParams& params) {
    __syncthreads();
    if (threadIdx.x == 0) {
      more = scheduler.next(work_tile);
      while (!more) {
        const int range = take_dynamic_range(params, scheduler.header);
        if (range < 0) break;
        scheduler.enter(range);
        more = scheduler.next(work_tile);
      }
    }
    __syncthreads();
    return more;
  }
};

// Grid: the CTAs of the schedule.
template <class Q, class KV, int kSlices, int kRows>
FI_DEVICE void batch_decode_cuda_core(const BatchDecodeParams& params, const Variant::Arguments& arguments = {}) {
  using Kernel = CudaCoreAttention<Q, KV, kSlices, kRows, PagedKv>;
  __shared__ typename Kernel::Shared shared;
  __shared__ AttentionProblem problem;
  __shared__ CtaTileScheduler scheduler;
  __shared__ Variant::Params variant_params;
  __shared__ int last;
  pdl_wait();
  if (threadIdx.x == 0) scheduler.begin(params);
#pragma unroll 1
  while (scheduler.next(params)) {
    const DecodeWorkTile& s = scheduler.work_tile;
    if (threadIdx.x == 0) {
      problem = params.request(s.request, s.kv_len, sizeof(Q), out_bytes(params.problem.out_type));
      variant_params.set(arguments, problem);
    }
    __syncthreads();
    Variant variant(variant_params, s.request);
    const CudaCoreEpilogue epilogue(params, s, variant);
    PagedKv pages{params.pages.page_indices + s.first_page, params.pages.last_page, params.pages.page_size,
                  params.pages.k_page, params.pages.v_page};
    pages.set_v_table(params.pages.v_table_offset);
    const int begin = max(s.begin * kDecodeKvTile, problem.mask.first_key(0));
    const int end = params.end_key(s);
    int rows;
#pragma unroll 1
    for (int row = 0; row < epilogue.rows; row += kIsE2m1<KV> ? rows : kRows) {
      const CudaCoreEpilogue of_head = kIsE2m1<KV> ? epilogue.of_row(row) : epilogue;
      rows = min(kRows, of_head.rows - row);
      Kernel kernel(problem, shared, of_head.kv_head, of_head.first + row, pages);
      kernel.load_queries();
      kernel.attend(begin, end, variant);
#pragma unroll 1
      for (int g = 0; g < rows; ++g) {
        const float row_max = kernel.merged_max(g), row_sum = kernel.merged_sum(g, row_max);
#pragma unroll 1
        for (int x = threadIdx.x * 4; x < problem.head_dim_vo; x += Kernel::kThreads * 4) {
          const float4 values =
              make_float4(kernel.merged_output(g, row_max, x), kernel.merged_output(g, row_max, x + 1),
                          kernel.merged_output(g, row_max, x + 2), kernel.merged_output(g, row_max, x + 3));
          if (s.is_whole())
            of_head.write(row + g, x, {row_max, row_sum, values});
          else
            of_head.store_partial(s.split_idx, row + g, x, {row_max, row_sum, values});
        }
      }
    }
    if (!s.is_whole())
      epilogue.merge_splits<kIsE2m1<KV>>(CtaEpilogueThreads{static_cast<int>(threadIdx.x), Kernel::kThreads, 1, &last});
  }
  pdl_launch_dependents();
}

// Each warp processes every kWarps-th slice of kKeys keys of a work tile, with a separate pipeline.
template <class T, class Q, class KV, int kDim, int kWarps, int kKeys, int kStages>
struct DecodeMmaKernel {
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kOutputPitch = kDim + 8;
  using KvTile = typename KvTileOf<KV, kDim, kKeys>::Type;
  using Tile = typename DecodeTileOf<T, Q, KV, kDim, KvTile, kKeys>::Type;
  using Scales = ScaleStages<KV, kDim, kKeys, kStages>;

  struct Ring : Scales {
    union {
      struct {
        char k[kStages][KvTile::kBytes], v[kStages][KvTile::kBytes];
      };
      float output[kDecodeQTile][kOutputPitch];
    };
  };
  struct Shared {
    Ring rings[kWarps];
    Q queries[kDecodeQTile][Tile::kPitch];
    float2 states[kWarps][kDecodeQTile];
    CtaTileScheduler scheduler;
    int last;
  };

  const BatchDecodeParams& params;
  Shared& shared;
  const int lane, warp;

  FI_DEVICE DecodeMmaKernel(const BatchDecodeParams& params, Shared& shared)
      : params(params), shared(shared), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

  // Keys [low, high) of a work tile, the next slice to load, and the offsets of its key l % kKeys in lane l.
  struct Slices {
    int low, high, key;
    int64_t k_offset, v_offset;
    int64_t page, v_page, slot;  // only for NVFP4
  };
  FI_DEVICE void look_up(const DecodeWorkTile& s, Slices& at) const {
    const int j = at.key + lane % kKeys;
    int64_t page = 0, v_page = 0, slot = 0;
    if (j >= at.low && j < at.high) {
      PagedKv tokens{params.pages.page_indices + s.first_page, params.pages.last_page, params.pages.page_size, 0, 0};
      tokens.set_v_table(params.pages.v_table_offset);
      page = tokens.page(j), slot = tokens.slot(j), v_page = kSplitTables ? tokens.v_page_of(j) : page;
    }
    at.k_offset = page * params.pages.k_page + slot * params.problem.k_token;
    at.v_offset = v_page * params.pages.v_page + slot * params.problem.v_token;
    if constexpr (Tile::kFp4) at.page = page, at.v_page = v_page, at.slot = slot;
  }

  // policy: of L2, on sm_90.
  FI_DEVICE static void copy(char* shared, const KV* from, bool valid, uint64_t policy) {
#if __CUDA_ARCH__ == 900
    cp_async_16_hinted(static_cast<unsigned>(__cvta_generic_to_shared(shared)), from, valid, policy);
#else
    cp_async_16(shared, from, valid);
#endif
  }
  FI_DEVICE void load(const KV* k, const KV* v, const Slices& at, int stage, uint64_t policy) const {
    Ring& ring = shared.rings[warp];
    // If the number of 16-byte chunks of a row is not a power of two, each round has its own addresses, too many for
    // registers.
    constexpr int kRounds = (kKeys * Tile::kChunks + 31) / 32,
                  kUnroll = Tile::kChunks & (Tile::kChunks - 1) ? 2 : kRounds;
#pragma unroll kUnroll
    for (int i = 0; i < kRounds; ++i) {
      const int index = min(i * 32 + lane, kKeys * Tile::kChunks - 1);
      const int key = index / Tile::kChunks, chunk = index % Tile::kChunks;
      const int64_t k_offset = __shfl_sync(0xffffffffu, at.k_offset, key);
      const int64_t v_offset = __shfl_sync(0xffffffffu, at.v_offset, key);
      const bool inside = at.key + key >= at.low && at.key + key < at.high;
      const int element = chunk * 16 / static_cast<int>(sizeof(KV));  // or byte of NVFP4
      copy(ring.k[stage] + KvTile{4}.offset(key, chunk), inside ? k + k_offset + element : k, inside, policy);
      copy(ring.v[stage] + KvTile{4}.offset(key, chunk), inside ? v + v_offset + element : v, inside, policy);
    }
  }

  FI_DEVICE void load_queries(const DecodeEpilogue& epilogue) const {
    const AttentionProblem& p = params.problem;
    constexpr int kQueryChunks = kDim * sizeof(Q) / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < epilogue.rows * kQueryChunks; i += kThreads) {
      const int r = i / kQueryChunks, chunk = i % kQueryChunks * 16;
      const Row row = params.row(epilogue.kv_head, epilogue.first + r);
      const int64_t token = params.first_token(epilogue.s.request) + row.i;
      const Q* from = static_cast<const Q*>(p.q) + token * p.q_token + row.head * p.q_head;
      cp_async_16(reinterpret_cast<char*>(shared.queries[r]) + chunk, reinterpret_cast<const char*>(from) + chunk);
    }
  }

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) shared.scheduler.begin(params);
    Tile tile({4}, 0);
#pragma unroll 1
    while (shared.scheduler.next(params)) {
      const DecodeWorkTile& s = shared.scheduler.work_tile;
      const AttentionProblem& p = params.problem;
      const auto problem = [&] { return params.keys_of(s.request, s.kv_len, shared.scheduler.bmm1); };
      const auto first = [&] { return s.begin * kDecodeKvTile + warp * kKeys; };
      Slices at{max(s.begin * kDecodeKvTile, problem().mask.first_key(0)), params.end_key(s), first(), 0, 0, 0, 0, 0};
      const int kv_head = params.kv_head(s.q_tile);
      const KV* k = static_cast<const KV*>(p.k) + kv_head * p.k_head;
      const KV* v = static_cast<const KV*>(p.v) + kv_head * p.v_head;
      look_up(s, at);
      load_queries(DecodeEpilogue(params, s, kDim));  // they arrive with the first keys
      constexpr int kStep = kWarps * kKeys;
      int stage = 0;
      const uint64_t policy =
          shared.scheduler.scheduler.header.cost < params.copies.evict_first_tiles ? kEvictFirst : kEvictNormal;
      // The loop loads keys kStages - 1 steps ahead. It has no prologue, which would repeat its code.
#pragma unroll 1
      for (;;) {
        if (at.key < at.high) load(k, v, at, stage, policy);
        if constexpr (Tile::kFp4) {
          Ring& ring = shared.rings[warp];
          const int j = at.key + lane;
          if (lane < kKeys && at.key < at.high)
            copy_scales<kDim>(p.kv_scales, at.page, at.v_page, at.slot, kv_head, j >= at.low && j < at.high,
                              ring.k_scales(stage) + lane * kDim / 16, ring.v_scales(stage) + lane * kDim / 16);
        }
        cp_async_commit();
        const int key = at.key - (kStages - 1) * kStep;
        at.key += kStep;
        look_up(s, at);
        if (++stage == kStages) stage = 0;
        if (key < first()) continue;
        cp_async_wait<kStages - 1>();
        __syncwarp();
        if (key == first()) {
          __syncthreads();
          const DecodeEpilogue tile_of(params, s, kDim);
          tile.begin(params, problem(), tile_of.kv_head, tile_of.first, tile_of.rows, shared.queries[0]);
        }
        Ring& ring = shared.rings[warp];
        const KvStage from{ring.k[stage], ring.v[stage], ring.k_scales(stage), ring.v_scales(stage)};
        if (tile.plain(key, at.low, at.high))
          tile.template attend<true>(problem, shared.queries[0], from, key, at.low, at.high, [] {});
        else if (key < at.high && key + kKeys > at.low)
          tile.template attend<false>(problem, shared.queries[0], from, key, at.low, at.high, [] {});
        __syncwarp();
        if (key + kStep >= at.high) break;
      }
      cp_async_wait<0>();
      __syncwarp();
      const DecodeEpilogue epilogue(params, s, kDim);
      tile.store(epilogue.rows, shared.rings[warp].output[0], kOutputPitch, shared.states[warp]);
      __syncthreads();
      int thread = threadIdx.x;
      asm volatile(""
                   : "+r"(thread));  // else the compiler computes epilogue addresses before the mainloop and keeps them
      CtaEpilogueThreads threads{thread, kThreads, 1, &shared.last};
      epilogue.run(
          threads,
          [&](int r, int x) {
            return DecodeEpilogue::merged_warps<kWarps>([&](int w) { return shared.states[w][r]; },
                                                        [&](int w) { return &shared.rings[w].output[r][x]; });
          },
          [] {}, [&](int r, int x, const PartialOutput& values) { epilogue.write(r, x, values); });
    }
    pdl_launch_dependents();
  }
};

// Grid: the CTAs of the schedule.
template <class T, class Q, class KV, int kDim, int kWarps, int kKeys, int kStages, int kSharedBytes>
FI_DEVICE void batch_decode_mma(const BatchDecodeParams& params) {
  extern __shared__ uint4 bytes[];
  using Kernel = DecodeMmaKernel<T, Q, KV, kDim, kWarps, kKeys, kStages>;
  static_assert(sizeof(typename Kernel::Shared) == kSharedBytes, "the launch requests this many bytes");
  pdl_wait();
  Kernel(params, *reinterpret_cast<typename Kernel::Shared*>(bytes)).run();
}

}  // namespace fi
