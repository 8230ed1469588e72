// How a block of Hopper merges the parts of an item: bulk copies bring them all to shared memory at once.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/decode/finish.cuh"

#ifndef FI_FEW
#define FI_FEW 4
#endif
namespace fi {

// `full` expects one arrival; room is for rows of several parts, totals for the states of the merged rows.
template <int kMostDirect, int kThreads>
struct BulkTeam : FinishTeam<kMostDirect> {
  Barrier& full;
  float2* totals;
  char* room;
  int room_bytes;
  unsigned phase = 0;

  static constexpr int kStates = kDecodeRows * sizeof(float2), kFew = FI_FEW;

  FI_DEVICE BulkTeam(int thread, int barrier, int* last, Barrier& full, float2* totals, char* room, int room_bytes)
      : FinishTeam<kMostDirect>{thread, kThreads, barrier, last},
        full(full),
        totals(totals),
        room(room),
        room_bytes(room_bytes) {}

  FI_DEVICE int rows_at_once(const Finish& finish, const PartRange& from) const {
    if (from.count <= kFew) return finish.rows;
    return min(finish.rows, (room_bytes / from.count - kStates) / (finish.dim * 4));
  }

  // Rows [row, row + rows) of all parts, one behind the other; row 0 comes with the states of all rows, and what each
  // part weighs takes the place of its m.
  FI_DEVICE void bring(const Finish& finish, const PartRange& from, int row, int rows) {
    if (from.count <= kFew) return;
    const int lane = this->thread % 32, warp = this->thread / 32;
    if (row == 0)
      pitch = kStates + rows * finish.dim * 4;
    else
      this->meet();
    const int states = row == 0 ? kStates : 0, bytes = states + rows * finish.dim * 4;
    if (this->thread == 0) full.arrive_expect(from.count * bytes);
    // A copy takes the warp that asks for it a hundred cycles.
    const int i = lane * kWarps + warp;
    fence_async_global();
#pragma unroll 1
    for (int part = i; part < from.count; part += kThreads) {
      const char* at = reinterpret_cast<const char*>(finish.slot_states(from.first + part * from.step));
      const int skip = kStates - states + row * finish.dim * 4;
      bulk_load(room + part * pitch + kStates - states, at + skip, bytes, full);
    }
    full.wait(phase);
    phase ^= 1;
    if (row == 0) weigh(finish, from, lane, warp);
    first = row;
  }

  FI_DEVICE RowPart merged(const Finish& finish, const PartRange& from, int r, int x) const {
    if (from.count <= kFew) return finish.merged(from, r, x);
    constexpr int kAtOnce = 4;
    const char* at = room + kStates + ((r - first) * finish.dim + x) * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int part = 0; part < from.count; part += kAtOnce) {
#pragma unroll
      for (int i = part; i < part + kAtOnce; ++i) {
        const int here = min(i, from.count - 1);  // the last once more, for nothing
        const float weight = i < from.count ? states(here)[r].x : 0.f;
        const float4 y = *reinterpret_cast<const float4*>(at + here * pitch);
        sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
      }
    }
    return {totals[r].x, totals[r].y, sum};
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  int pitch, first;

  FI_DEVICE float2* states(int part) const { return reinterpret_cast<float2*>(room + part * pitch); }

  // A row a warp, a part a lane.
  FI_DEVICE void weigh(const Finish& finish, const PartRange& from, int lane, int warp) const {
#pragma unroll 1
    for (int r = warp; r < finish.rows; r += kWarps) {
      float m = kMinusInf, d = 0.f;
#pragma unroll 1
      for (int part = lane; part < from.count; part += 32) m = fmaxf(m, states(part)[r].x);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
#pragma unroll 1
      for (int part = lane; part < from.count; part += 32) {
        float2& state = states(part)[r];
        state.x = softmax_weight<CudaMath>(state.x, softmax_base(m));
        d += state.x * state.y;
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) d += __shfl_xor_sync(0xffffffffu, d, offset);
      if (lane == 0) totals[r] = make_float2(m, d);
    }
    this->meet();
  }
};

}  // namespace fi
