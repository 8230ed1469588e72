// Batch decode on sm_80 and later: on CUDA cores, for all types and head dims, and on tensor cores with cp.async.
#pragma once
#include "fi/attention/cuda_core_attention.cuh"
#include "fi/attention/decode/cuda_core_epilogue.cuh"
#include "fi/attention/decode/dynamic_ranges.cuh"
#include "fi/attention/decode/split_kv_epilogue.cuh"
#include "fi/attention/decode/warp_mma_tile.cuh"
#include "fi/cuda/ptx/cp_async.cuh"

namespace fi {

using Team = EpilogueThreads<16>;  // parts that are read at once by one block

// The walk of a block, in shared memory: one thread takes the steps, which saves the others thirty registers.
struct CtaTileScheduler {
  DecodeTileScheduler walk;
  DecodeWorkTile segment;
  bool more;
  float bmm1;

  FI_DEVICE void begin(const BatchDecodeParams& params) {
    bmm1 = params.bmm1_scale ? *params.bmm1_scale : 1.f;
    walk.begin(params.view(), blockIdx.x, params.problem.mask.qo_len, params.problem.mask.window_left);
  }
  // By all threads of the block, the first of which has called begin. A barrier.
  FI_DEVICE bool next(const BatchDecodeParams& params) {
    __syncthreads();
    if (threadIdx.x == 0) {
      more = walk.next(segment);
      while (!more) {
        const int range = next_dynamic_range(params, walk.header);
        if (range < 0) break;
        walk.enter(range);
        more = walk.next(segment);
      }
    }
    __syncthreads();
    return more;
  }
};

// Grid: the blocks of the schedule.
template <class Q, class KV, int kSlices, int kRows>
FI_DEVICE void decode_rows(const BatchDecodeParams& params, const Variant::Arguments& arguments = {}) {
  using Kernel = CudaCoreAttention<Q, KV, kSlices, kRows, PagedKv>;
  __shared__ typename Kernel::Shared shared;
  __shared__ AttentionProblem problem;
  __shared__ CtaTileScheduler walk;
  __shared__ Variant::Params variant_params;
  __shared__ int last;
  pdl_wait();
  if (threadIdx.x == 0) walk.begin(params);
#pragma unroll 1
  while (walk.next(params)) {
    const DecodeWorkTile& s = walk.segment;
    if (threadIdx.x == 0) {
      problem = params.request(s.request, s.kv_len, sizeof(Q), out_bytes(params.problem.out_type));
      variant_params.set(arguments, problem);
    }
    __syncthreads();
    Variant variant(variant_params, s.request);
    const CudaCoreEpilogue finish(params, s, variant);
    const PagedKv pages{params.page_indices + s.first_page, params.page_size, params.k_page, params.v_page};
    const int begin = max(s.begin * kDecodeKvTile, problem.mask.first_key(0));
    const int end = params.end_key(s);
#pragma unroll 1
    for (int row = 0; row < finish.rows; row += kRows) {
      Kernel kernel(problem, shared, finish.kv_head, finish.first + row, pages);
      kernel.load_queries();
      kernel.attend(begin, end, variant);
#pragma unroll 1
      for (int g = 0; g < min(kRows, finish.rows - row); ++g) {
        const float m = kernel.merged_m(g), d = kernel.merged_d(g, m);
#pragma unroll 1
        for (int x = threadIdx.x * 4; x < problem.head_dim_vo; x += Kernel::kThreads * 4) {
          const float4 values = make_float4(kernel.merged_output(g, m, x), kernel.merged_output(g, m, x + 1),
                                            kernel.merged_output(g, m, x + 2), kernel.merged_output(g, m, x + 3));
          if (s.is_whole())
            finish.write(row + g, x, {m, d, values});
          else
            finish.publish(s.split_idx, row + g, x, {m, d, values});
        }
      }
    }
    if (!s.is_whole()) finish.complete(Team{static_cast<int>(threadIdx.x), Kernel::kThreads, 1, &last});
  }
  pdl_launch_dependents();
}

// Each warp takes every kWarps-th slice of kKeys keys of a segment, through a ring of its own.
template <class T, class Q, class KV, int kDim, int kWarps, int kKeys, int kStages>
struct DecodeMmaKernel {
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kOutputPitch = kDim + 8;
  using Lines = SwizzledKvTile<(kDim * sizeof(KV) + 127) / 128, kKeys>;
  using Tile = WarpMmaTile<T, Q, KV, kDim, Lines, kKeys>;

  struct Ring {
    union {
      struct {
        char k[kStages][Lines::kBytes], v[kStages][Lines::kBytes];
      };
      float output[kDecodeQTile][kOutputPitch];
    };
  };
  struct Shared {
    Ring rings[kWarps];
    Q queries[kDecodeQTile][Tile::kPitch];
    float2 states[kWarps][kDecodeQTile];
    CtaTileScheduler walk;
    int last;
  };

  const BatchDecodeParams& params;
  Shared& shared;
  const int lane, warp;

  FI_DEVICE DecodeMmaKernel(const BatchDecodeParams& params, Shared& shared)
      : params(params), shared(shared), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

  // The keys of a segment that are read, and where lane l finds key l % kKeys of the slice that is loaded next.
  struct Slices {
    int low, high, key;
    int64_t k_offset, v_offset;
  };
  FI_DEVICE void look_up(const DecodeWorkTile& s, Slices& at) const {
    const int j = at.key + lane % kKeys;
    int64_t page = 0, slot = 0;
    if (j >= at.low && j < at.high) {
      const PagedKv tokens{params.page_indices + s.first_page, params.page_size, 0, 0};
      page = tokens.page(j), slot = tokens.slot(j);
    }
    at.k_offset = page * params.k_page + slot * params.problem.k_token;
    at.v_offset = page * params.v_page + slot * params.problem.v_token;
  }

  FI_DEVICE void load(const KV* k, const KV* v, const Slices& at, int stage) const {
    Ring& ring = shared.rings[warp];
    // Where a row is no power of two pieces, every round has places of its own, which must not all lie in registers.
    constexpr int kRounds = (kKeys * Tile::kPieces + 31) / 32,
                  kAtOnce = Tile::kPieces & (Tile::kPieces - 1) ? 2 : kRounds;
#pragma unroll kAtOnce
    for (int i = 0; i < kRounds; ++i) {
      const int place = min(i * 32 + lane, kKeys * Tile::kPieces - 1);
      const int key = place / Tile::kPieces, piece = place % Tile::kPieces;
      const int64_t k_offset = __shfl_sync(0xffffffffu, at.k_offset, key);
      const int64_t v_offset = __shfl_sync(0xffffffffu, at.v_offset, key);
      const bool inside = at.key + key >= at.low && at.key + key < at.high;
      const int element = piece * 16 / static_cast<int>(sizeof(KV));
      cp_async_16(ring.k[stage] + Lines{4}.offset(key, piece), inside ? k + k_offset + element : k, inside);
      cp_async_16(ring.v[stage] + Lines{4}.offset(key, piece), inside ? v + v_offset + element : v, inside);
    }
  }

  FI_DEVICE void load_queries(const DecodeEpilogue& finish) const {
    const AttentionProblem& p = params.problem;
    constexpr int kQueryPieces = kDim * sizeof(Q) / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < finish.rows * kQueryPieces; i += kThreads) {
      const int r = i / kQueryPieces, piece = i % kQueryPieces * 16;
      const Row row = params.row(finish.kv_head, finish.first + r);
      const int64_t token = params.first_token(finish.s.request) + row.i;
      const Q* from = static_cast<const Q*>(p.q) + token * p.q_token + row.head * p.q_head;
      cp_async_16(reinterpret_cast<char*>(shared.queries[r]) + piece, reinterpret_cast<const char*>(from) + piece);
    }
  }

  FI_DEVICE void run() const {
    if (threadIdx.x == 0) shared.walk.begin(params);
    Tile tile({4}, 0);
#pragma unroll 1
    while (shared.walk.next(params)) {
      const DecodeWorkTile& s = shared.walk.segment;
      const AttentionProblem& p = params.problem;
      const auto problem = [&] { return params.keys_of(s.request, s.kv_len, shared.walk.bmm1); };
      const auto first = [&] { return s.begin * kDecodeKvTile + warp * kKeys; };
      Slices at{max(s.begin * kDecodeKvTile, problem().mask.first_key(0)), params.end_key(s), first(), 0, 0};
      const int kv_head = params.kv_head(s.q_tile);
      const KV* k = static_cast<const KV*>(p.k) + kv_head * p.k_head;
      const KV* v = static_cast<const KV*>(p.v) + kv_head * p.v_head;
      look_up(s, at);
      load_queries(DecodeEpilogue(params, s, kDim));  // they arrive with the first keys
      constexpr int kStep = kWarps * kKeys;
      int stage = 0;
      // Keys are asked for kStages - 1 steps ahead, by the same code from the first to the last.
#pragma unroll 1
      for (;;) {
        if (at.key < at.high) load(k, v, at, stage);
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
        if (tile.plain(key, at.low, at.high))
          tile.template attend<true>(problem, shared.queries[0], ring.k[stage], ring.v[stage], key, at.low, at.high,
                                     [] {});
        else if (key < at.high && key + kKeys > at.low)
          tile.template attend<false>(problem, shared.queries[0], ring.k[stage], ring.v[stage], key, at.low, at.high,
                                      [] {});
        __syncwarp();
        if (key + kStep >= at.high) break;
      }
      cp_async_wait<0>();
      __syncwarp();
      const DecodeEpilogue finish(params, s, kDim);
      tile.leave(finish.rows, shared.rings[warp].output[0], kOutputPitch, shared.states[warp]);
      __syncthreads();
      int thread = threadIdx.x;
      asm volatile("" : "+r"(thread));  // what follows from it is not computed before the loop over keys, and kept
      Team team{thread, kThreads, 1, &shared.last};
      finish.finish(
          team,
          [&](int r, int x) {
            return DecodeEpilogue::merged_warps<kWarps>([&](int w) { return shared.states[w][r]; },
                                                        [&](int w) { return &shared.rings[w].output[r][x]; });
          },
          [] {}, [&](int r, int x, const PartialOutput& values) { finish.write(r, x, values); });
    }
    pdl_launch_dependents();
  }
};

// Grid: the blocks of the schedule.
template <class T, class Q, class KV, int kDim, int kWarps, int kKeys, int kStages, int kSharedBytes>
FI_DEVICE void decode_tiles(const BatchDecodeParams& params) {
  extern __shared__ uint4 bytes[];
  using Kernel = DecodeMmaKernel<T, Q, KV, kDim, kWarps, kKeys, kStages>;
  static_assert(sizeof(typename Kernel::Shared) == kSharedBytes, "the family's Python says how much to ask for");
  pdl_wait();
  Kernel(params, *reinterpret_cast<typename Kernel::Shared*>(bytes)).run();
}

}  // namespace fi
