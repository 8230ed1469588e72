// What producers of MLA on Hopper share: they give work tiles to consumers, load queries and
// look up the pages of KV tiles.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/cuda/pipeline_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/swizzle.cuh"

namespace fi {

// By whole warps: the next work tile, which one thread, the leader, gives to the consumers. Returns whether there is
// one.
template <class Shared>
FI_DEVICE bool publish_next(MlaScheduler& scheduler, Shared& shared, MlaWork& s, int use, bool leader) {
  const bool more = scheduler.next(s);
  if (leader) {
    const auto at = PipelineState::producer_at<2>(use);
    shared.work_pipeline.acquire(at);
    if (!more) s.index = -1;
    shared.work[at.stage] = s;
    shared.work_pipeline.commit(at.stage);
  }
  __syncwarp();
  return more;
}

// Loads kRows queries of a request, from packed row row0 on, as blocks of 64 columns; rows beyond the request become
// zeros. thread: of `threads`.
template <class T, int kRows>
FI_DEVICE void load_mla_queries(const BatchMlaParams& params, const MlaWorkTile& s, int row0, char* to, int thread,
                                int threads) {
  constexpr int kLatentBlocks = kMlaLatent / 64, kBlockBytes = kRows * 128;
  const int rows = s.request.qo_len * static_cast<int>(params.heads.value);
#pragma unroll 1
  for (int i = thread; i < kRows * 8; i += threads) {
    const int r = i / 8, chunk = i % 8;
    const bool valid = row0 + r < rows;
    const auto row = params.row(valid ? row0 + r : 0);
    const int64_t token = s.request.qo_begin + row.token;
    const T* nope =
        static_cast<const T*>(params.q_nope) + token * params.q_nope_token + row.head * params.q_nope_head + chunk * 8;
    const T* pe = static_cast<const T*>(params.q_pe) + token * params.q_pe_token + row.head * params.q_pe_head;
    char* place = to + swizzled_offset(r, chunk);
#pragma unroll
    for (int block = 0; block < kLatentBlocks; ++block)
      cp_async_16(place + block * kBlockBytes, nope + block * 64, valid);
    cp_async_16(place + kLatentBlocks * kBlockBytes, pe + chunk * 8, valid);
  }
}

// Where the KV tiles of a work tile begin, in pages that are a multiple of a tile: lane l looks up tiles l, l + 32,
// ..., 32 tiles ahead.
struct MlaTilePages {
  const BatchMlaParams& params;
  const MlaWorkTile& s;
  const int high;  // the key after the last one
  int page = 0, slot = 0, next_page, next_slot;

  FI_DEVICE MlaTilePages(const BatchMlaParams& params, const MlaWorkTile& s, int high)
      : params(params), s(s), high(high) {
    look_up(s.begin);
  }
  // Before tile number i of the work tile, which is `tile` of the request.
  FI_DEVICE void advance(int i, int tile) {
    if (i % 32 != 0) return;
    page = next_page, slot = next_slot;
    look_up(tile + 32);
  }
  // Of tile number i.
  FI_DEVICE int page_of(int i) const { return __shfl_sync(0xffffffffu, page, i % 32); }
  FI_DEVICE int slot_of(int i) const { return __shfl_sync(0xffffffffu, slot, i % 32); }
  // Of tile number i + `ahead`.
  FI_DEVICE int later_page_of(int i, int ahead) const {
    return __shfl_sync(0xffffffffu, i % 32 + ahead < 32 ? page : next_page, (i + ahead) % 32);
  }
  FI_DEVICE int later_slot_of(int i, int ahead) const {
    return __shfl_sync(0xffffffffu, i % 32 + ahead < 32 ? slot : next_slot, (i + ahead) % 32);
  }

 private:
  FI_DEVICE void look_up(int first) {
    const int key = (first + static_cast<int>(threadIdx.x % 32)) * kMlaKvTile;
    next_page = next_slot = 0;
    if (key >= high) return;
    const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.page_size));
    next_page = params.page_indices[s.request.first_page + index];
    next_slot = key - index * static_cast<int>(params.page_size.value);
  }
};

}  // namespace fi
