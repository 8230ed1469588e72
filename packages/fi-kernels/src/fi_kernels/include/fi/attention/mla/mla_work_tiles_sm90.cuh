// What producers of MLA on Hopper share: they give work tiles to consumers and look up the pages of KV tiles.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/cuda/pipeline_sm90.cuh"

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
