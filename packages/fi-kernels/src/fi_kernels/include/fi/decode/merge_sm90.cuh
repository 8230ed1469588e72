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

  // Rows [row, row + rows) of all parts, and what each part weighs, which takes the place of its m.
  FI_DEVICE void bring(const Finish& finish, const PartRange& from, int row, int rows) {
    if (from.count <= kFew) return;
    const int bytes = rows * finish.dim * 4, lane = this->thread % 32, warp = this->thread / 32;
    if (row > 0) this->meet();
    if (warp == 0) {
      fence_async_global();
      if (lane == 0) full.arrive_expect(from.count * (kStates + bytes));
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < from.count; i += 32) {
        const int part = from.first + i * from.step;
        bulk_load(states(i), finish.slot_states(part), kStates, full);
        bulk_load(room + from.count * kStates + i * bytes, finish.slot(part) + row * finish.dim, bytes, full);
      }
    }
    full.wait(phase);
    phase ^= 1;
#pragma unroll 1
    for (int r = row + warp; r < row + rows; r += kThreads / 32) {
      float m = kMinusInf, d = 0.f;
#pragma unroll 1
      for (int i = lane; i < from.count; i += 32) m = fmaxf(m, states(i)[r].x);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
#pragma unroll 1
      for (int i = lane; i < from.count; i += 32) {
        const float2 state = states(i)[r];
        const float weight = softmax_weight<CudaMath>(state.x, softmax_base(m));
        states(i)[r].x = weight;
        d += weight * state.y;
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) d += __shfl_xor_sync(0xffffffffu, d, offset);
      if (lane == 0) totals[r] = make_float2(m, d);
    }
    this->meet();
    values = room + from.count * kStates + (-row * finish.dim) * 4;
    pitch = bytes;
  }

  FI_DEVICE RowPart merged(const Finish& finish, const PartRange& from, int r, int, int x) const {
    if (from.count <= kFew) return finish.merged(from, r, x);
    constexpr int kAtOnce = 4;
    const char* at = values + (r * finish.dim + x) * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int first = 0; first < from.count; first += kAtOnce) {
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) {
        const int here = min(i, from.count - 1);  // the last once more, for nothing
        const float weight = i < from.count ? states(here)[r].x : 0.f;
        const float4 y = *reinterpret_cast<const float4*>(at + here * pitch);
        sum.x += weight * y.x, sum.y += weight * y.y, sum.z += weight * y.z, sum.w += weight * y.w;
      }
    }
    return {totals[r].x, totals[r].y, sum};
  }

 private:
  const char* values;
  int pitch;
  FI_DEVICE float2* states(int i) const { return reinterpret_cast<float2*>(room + i * kStates); }
};

}  // namespace fi
