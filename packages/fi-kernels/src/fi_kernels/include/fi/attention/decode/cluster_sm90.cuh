// Batch decode of small batches on Hopper: a cluster of CTAs for each q tile of a request. Warps read 16 keys in turn
// by TMA, and the cluster merges their partials in distributed shared memory.
#pragma once
#include "fi/attention/decode/split_kv_epilogue.cuh"
#include "fi/attention/decode/warp_mma_tile.cuh"
#include "fi/attention/paged_kv.cuh"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/tma_tile_sm90.cuh"

namespace fi {

// Instruction fetches from DRAM dominate the time: all warps run one path once, without repeated code. Scores take a
// scale and a range of keys only.
template <class T, class Q, class KV, int kDim, int kWarps, int kStages, bool kWhole, bool kGather>
struct DecodeClusterKernel {
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kKeys = 16;  // of a box, which one warp processes
  static constexpr int kLines = (kDim * sizeof(KV) + 127) / 128;
  static constexpr int kOutputPitch = kDim + 8;
  static constexpr int kFloat4s = kDim / 4;
  using KvTile = SwizzledKvTile<kLines, kKeys>;
  using Tile = WarpMmaTile<T, Q, KV, kDim, KvTile, kKeys>;

  union WarpBuffer {
    struct {
      char k[kStages][KvTile::kBytes], v[kStages][KvTile::kBytes];
    } ring;
    float output[kDecodeQTile][kOutputPitch];  // after the mainloop
  };
  static_assert(sizeof(WarpBuffer) % 1024 == 0, "the period of the swizzle");
  struct Shared {
    WarpBuffer warp_buffers[kWarps];
    float4 values[kDecodeQTile * kFloat4s];  // partials of all CTAs, for the elements that this CTA writes
    float2 value_states[kDecodeQTile * kFloat4s];
    Q queries[kDecodeQTile][Tile::kPitch];
    float2 states[kWarps][kDecodeQTile];
    Barrier full_k[kWarps][kStages], full_v[kWarps][kStages], partials_full;
  };

  const BatchDecodeParams& params;
  Shared& shared;
  const int lane, warp;

  FI_DEVICE DecodeClusterKernel(const BatchDecodeParams& params, Shared& shared)
      : params(params), shared(shared), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

  // The boxes of this warp: the first key of the first box, and the step between boxes. Lane l holds page and slot of
  // boxes l, 32 + l, ...; slot -1: no such box.
  struct Boxes {
    int first, step, low, kv_len, first_page;
    int page, v_page, slot;
  };
  FI_DEVICE void look_up(Boxes& b, int box) const {
    const int64_t key = b.first + static_cast<int64_t>(box) * b.step;
    b.slot = -1;
    if (key >= b.kv_len) return;
    const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.pages.page_size));
    b.slot = static_cast<int>(key) - index * static_cast<int>(params.pages.page_size.value);
    b.page = params.pages.page_indices[b.first_page + index];
    if (kSplitTables) b.v_page = params.pages.page_indices[b.first_page + index + params.pages.v_table_offset];
  }
  FI_DEVICE void load_box(const Boxes& b, int stage, int head) const {
    if (b.slot < 0) return;
    auto& ring = shared.warp_buffers[warp].ring;
    Barrier &full_k = shared.full_k[warp][stage], &full_v = shared.full_v[warp][stage];
    full_k.arrive_expect(KvTile::kBytes);
    copy(ring.k[stage], params.copies.k, full_k, b.slot, head, b.page);
    full_v.arrive_expect(KvTile::kBytes);
    copy(ring.v[stage], params.copies.v, full_v, b.slot, head, kSplitTables ? b.v_page : b.page);
  }
  FI_DEVICE static void copy(char* to, const TensorMap& map, Barrier& full, int slot, int head, int page) {
    tma_load_tile<kWhole ? 1 : kDim>(reinterpret_cast<KV*>(to), kKeys * 128 / sizeof(KV), map, full, 0, slot, 0, head,
                                     page, kEvictFirst);
  }

  // Pages smaller than a box: cp.async copies single rows. Lane l holds the offsets of key l % 16 of a box.
  struct RowOffsets {
    int64_t k, v;
  };
  FI_DEVICE RowOffsets row_offsets(const Boxes& b, int box, int head) const {
    const int64_t key = b.first + static_cast<int64_t>(box) * b.step + lane % kKeys;
    if (key < b.low || key >= b.kv_len) return {0, 0};
    PagedKv tokens{params.pages.page_indices + b.first_page, params.pages.last_page, params.pages.page_size, 0, 0};
    tokens.set_v_table(params.pages.v_table_offset);
    const int64_t page = tokens.page(static_cast<int>(key)), slot = tokens.slot(static_cast<int>(key));
    const int64_t v_page = kSplitTables ? tokens.v_page_of(static_cast<int>(key)) : page;
    return {page * params.pages.k_page + slot * params.problem.k_token + head * params.problem.k_head,
            v_page * params.pages.v_page + slot * params.problem.v_token + head * params.problem.v_head};
  }
  FI_DEVICE void gather(const Boxes& b, int box, int stage, const RowOffsets& rows) const {
    constexpr int kChunks = kDim * sizeof(KV) / 16;
    auto& ring = shared.warp_buffers[warp].ring;
    const int64_t at = b.first + static_cast<int64_t>(box) * b.step;
    if (at < b.kv_len) {
#pragma unroll 2
      for (int round = 0; round < (kKeys * kChunks + 31) / 32; ++round) {
        const int index = min(round * 32 + lane, kKeys * kChunks - 1), key = index / kChunks, chunk = index % kChunks;
        const KV* k = static_cast<const KV*>(params.problem.k) + __shfl_sync(~0u, rows.k, key);
        const KV* v = static_cast<const KV*>(params.problem.v) + __shfl_sync(~0u, rows.v, key);
        const bool inside = at + key >= b.low && at + key < b.kv_len;
        const unsigned to = KvTile{4}.offset(key, chunk);
        cp_async_16_hinted(static_cast<unsigned>(__cvta_generic_to_shared(ring.k[stage] + to)),
                           reinterpret_cast<const char*>(k) + chunk * 16, inside, kEvictFirst);
        cp_async_16_hinted(static_cast<unsigned>(__cvta_generic_to_shared(ring.v[stage] + to)),
                           reinterpret_cast<const char*>(v) + chunk * 16, inside, kEvictFirst);
      }
    }
    cp_async_commit();
  }

  FI_DEVICE void load_queries(const DecodeEpilogue& epilogue) const {
    constexpr int kChunks = kDim * sizeof(Q) / 16;
    const AttentionProblem& p = params.problem;
#pragma unroll 1
    for (int i = threadIdx.x; i < epilogue.rows * kChunks; i += kThreads) {
      const int r = i / kChunks, chunk = i % kChunks * 16;
      const char* from =
          static_cast<const char*>(p.q) +
          (epilogue.s.request * p.q_token + (epilogue.kv_head * p.group() + epilogue.first + r) * p.q_head) *
              static_cast<int64_t>(sizeof(Q));
      cp_async_16(reinterpret_cast<char*>(shared.queries[r]) + chunk, from + chunk);
    }
    cp_async_commit();
  }

  FI_DEVICE void run() const {
    if (!kGather && lane == 0)
      for (int i = 0; i < kStages; ++i) shared.full_k[warp][i].init(1), shared.full_v[warp][i].init(1);
    if (threadIdx.x == 0) {
      shared.partials_full.init(1);
      if (!kGather) prefetch_tensor_map(params.copies.k), prefetch_tensor_map(params.copies.v);
    }
    fence_barrier_init();
    __syncwarp();
    cluster_arrive_relaxed();
    const unsigned num_ctas = cluster_size(), rank = cluster_rank();
    DecodeWorkTile s;
    s.q_tile = static_cast<int>(blockIdx.x / num_ctas), s.request = static_cast<int>(blockIdx.y);
    pdl_wait();
    if (warp == 0 && static_cast<int64_t>(lane) * 128 < params.copies.index_bytes)
      prefetch_l2(params.pages.page_indices + lane * 32);  // loads at the same time as the length
    const DecodeRequest request = params.schedule.requests()[s.request];
    const float bmm1 = params.scales.bmm1 ? *params.scales.bmm1 : 1.f;
    const DecodeEpilogue epilogue(params, s, kDim);
    load_queries(epilogue);
    Boxes boxes;
    const int low = Mask::of_range(0, params.problem.mask.window_left, 1, request.kv_len).first_key(0);
    boxes.first = low / kKeys * kKeys + static_cast<int>(rank * kWarps + warp) * kKeys;
    boxes.step = static_cast<int>(num_ctas) * kWarps * kKeys;
    boxes.low = low, boxes.kv_len = request.kv_len, boxes.first_page = request.first_page;
    RowOffsets rows;  // of the box that is loaded next
    if constexpr (kGather) {
      rows = row_offsets(boxes, 0, epilogue.kv_head);
#pragma unroll 1
      for (int box = 0; box < kStages; ++box) {
        gather(boxes, box, box, rows);
        rows = row_offsets(boxes, box + 1, epilogue.kv_head);
      }
    } else {
      look_up(boxes, lane);
      if (lane < kStages) load_box(boxes, lane, epilogue.kv_head);
    }
    if (threadIdx.x == 0) {
      const unsigned own =
          (epilogue.rows * kFloat4s - rank + num_ctas - 1) / num_ctas;  // elements of this CTA, each from num_ctas CTAs
      shared.partials_full.arrive_expect(own * num_ctas * (sizeof(float4) + sizeof(float2)));
    }
    const auto problem = [&] {  // constants: the compiler drops the code of other masks and scores
      AttentionProblem p = params.problem;
      p.mask = Mask::of_range(0, -1, 1, request.kv_len);
      p.scores = {p.scores.sm_scale * bmm1, 0.f, 0};
      return p;
    };
    Tile tile({4}, 0);
    cp_async_wait<kGather ? kStages : 0>();
    __syncthreads();
    tile.begin(params, problem(), epilogue.kv_head, epilogue.first, epilogue.rows, shared.queries[0]);
    PipelineState at;
#pragma unroll 1
    for (int box = 0, key = boxes.first; key < request.kv_len; ++box, key += boxes.step) {
      auto& ring = shared.warp_buffers[warp].ring;
      if constexpr (kGather) {
        cp_async_wait<kStages - 1>();
        __syncwarp();
      } else {
        shared.full_k[warp][at.stage].wait(at.phase);
      }
      const KvStage stage{ring.k[at.stage], ring.v[at.stage], nullptr, nullptr};
      tile.template attend<false>(problem, shared.queries[0], stage, key, low, request.kv_len, [&] {
        if constexpr (!kGather) shared.full_v[warp][at.stage].wait(at.phase);
      });
      __syncwarp();
      const int next = box + kStages;
      if constexpr (kGather) {
        gather(boxes, next, at.stage, rows);
        rows = row_offsets(boxes, next + 1, epilogue.kv_head);
      } else {
        if (next % 32 == 0) look_up(boxes, next + lane);
        if (next % 32 == lane) load_box(boxes, at.stage, epilogue.kv_head);
      }
      at.advance(kStages);
    }
    tile.store(epilogue.rows, shared.warp_buffers[warp].output[0], kOutputPitch, shared.states[warp]);
    __syncthreads();
    cluster_wait();  // the barriers of the other CTAs are initialised
    send(epilogue, num_ctas, rank);
    pdl_launch_dependents();
    shared.partials_full.wait(0);
    merge(epilogue, num_ctas, rank);
  }

  // Sends the partial of this CTA: element e, four values, to CTA e % num_ctas of the cluster.
  FI_DEVICE void send(const DecodeEpilogue& epilogue, unsigned num_ctas, unsigned rank) const {
#pragma unroll 1
    for (int e = threadIdx.x; e < epilogue.rows * kFloat4s; e += kThreads) {
      const int r = e / kFloat4s, x = e % kFloat4s * 4;
      const PartialOutput partial = DecodeEpilogue::merged_warps<kWarps>(
          [&](int w) { return shared.states[w][r]; }, [&](int w) { return &shared.warp_buffers[w].output[r][x]; });
      const unsigned to = e & (num_ctas - 1), index = e - to + rank,
                     barrier = cluster_address(&shared.partials_full, to);
      cluster_send_f32x4(cluster_address(&shared.values[index], to), partial.output, barrier);
      cluster_send_f32x2(cluster_address(&shared.value_states[index], to),
                         make_float2(partial.row_max, partial.row_sum), barrier);
    }
  }
  // Merges and writes the elements of this CTA, one lane per partial.
  FI_DEVICE void merge(const DecodeEpilogue& epilogue, unsigned num_ctas, unsigned rank) const {
#pragma unroll 1
    for (unsigned first = warp * 32; first < epilogue.rows * kFloat4s; first += kThreads) {
      const unsigned at = first + lane, source = at & (num_ctas - 1), e = at - source + rank;
      const bool inside = e < epilogue.rows * kFloat4s;
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      float2 state = make_float2(kMinusInf, 0.f);
      if (inside) x = shared.values[at], state = shared.value_states[at];
      float row_max = state.x;
#pragma unroll 1
      for (unsigned offset = num_ctas / 2; offset > 0; offset /= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, offset));
      const float rescale = softmax_exp2<CudaMath>(state.x, softmax_reference(row_max));
      float row_sum = state.y * rescale;
      x.x *= rescale, x.y *= rescale, x.z *= rescale, x.w *= rescale;
#pragma unroll 1
      for (unsigned offset = num_ctas / 2; offset > 0; offset /= 2) {
        row_sum += __shfl_xor_sync(~0u, row_sum, offset);
        x.x += __shfl_xor_sync(~0u, x.x, offset);
        x.y += __shfl_xor_sync(~0u, x.y, offset);
        x.z += __shfl_xor_sync(~0u, x.z, offset);
        x.w += __shfl_xor_sync(~0u, x.w, offset);
      }
      if (source == 0 && inside)
        epilogue.write(static_cast<int>(e / kFloat4s), static_cast<int>(e % kFloat4s * 4), {row_max, row_sum, x});
    }
  }
};

// Grid: a cluster for each q_tile, along x, and requests along y.
template <class T, class Q, class KV, int kDim, int kWarps, int kStages, bool kWhole, bool kGather, int kSharedBytes>
FI_DEVICE void batch_decode_cluster(const BatchDecodeParams& params) {
  extern __shared__ __align__(1024) char buffer[];
  using Kernel = DecodeClusterKernel<T, Q, KV, kDim, kWarps, kStages, kWhole, kGather>;
  static_assert(sizeof(typename Kernel::Shared) == kSharedBytes, "the launch requests this many bytes");
  Kernel(params, *reinterpret_cast<typename Kernel::Shared*>(buffer)).run();
}

}  // namespace fi
