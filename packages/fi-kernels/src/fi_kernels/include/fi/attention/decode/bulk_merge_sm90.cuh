// Merging of split-KV partials on Hopper: bulk copies load all partials of a q tile into shared memory at once.
#pragma once
#include "fi/attention/decode/split_kv_epilogue.cuh"
#include "fi/cuda/ptx/bulk_sm90.cuh"

namespace fi {

// `full` takes one arrival per phase. buffer: rows of several partials; totals: the softmax states of the merged rows.
template <int kMaxDirect, int kThreads>
struct BulkEpilogueThreads : EpilogueThreads<kMaxDirect, kChunkLoads> {
  Barrier& full;
  float2* totals;
  char* buffer;
  int buffer_bytes;
  unsigned phase = 0;

  static constexpr int kStates = kDecodeQTile * sizeof(float2);
  // Threads read up to this many splits from global memory; bulk copies pay for more (docs/notes/decode-merge.md).
  static constexpr int kMaxGlobalSplits = 4;

  FI_DEVICE BulkEpilogueThreads(int thread, int barrier, int* last, Barrier& full, float2* totals, char* buffer,
                                int buffer_bytes)
      : EpilogueThreads<kMaxDirect, kChunkLoads>{thread, kThreads, barrier, last},
        full(full),
        totals(totals),
        buffer(buffer),
        buffer_bytes(buffer_bytes) {}

  template <class Take>
  FI_DEVICE void merge(const DecodeEpilogue& epilogue, const SplitRange& from, Take&& take) {
    if (from.count <= kMaxGlobalSplits) return EpilogueThreads<kMaxDirect, kChunkLoads>::merge(epilogue, from, take);
    const int at_once = min(epilogue.rows, (buffer_bytes / from.count - kStates) / (epilogue.dim * 4));
    pitch = kStates + at_once * epilogue.dim * 4;
#pragma unroll 1
    for (int row = 0; row < epilogue.rows; row += at_once) {
      const int count = min(at_once, epilogue.rows - row);
      load(epilogue, from, row, count);
      epilogue.for_each_float4(*this, row, count, [&](int r, int x) {
        take(r, x,
             epilogue.s.has_chunks() ? merged_in_order(epilogue, from, r, row, x) : merged(epilogue, from, r, row, x));
      });
      this->sync();
    }
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  int pitch;

  FI_DEVICE float2* states(int split) const { return reinterpret_cast<float2*>(buffer + split * pitch); }

  // Loads rows [row, row + rows) of all partials, one after the other. Row 0 also loads the states of all rows, whose
  // row_max is replaced by the rescale factor of the partial.
  FI_DEVICE void load(const DecodeEpilogue& epilogue, const SplitRange& from, int row, int rows) {
    const int lane = this->thread % 32, warp = this->thread / 32;
    const int states = row == 0 ? kStates : 0, bytes = states + rows * epilogue.dim * 4;
    if (this->thread == 0) full.arrive_expect(from.count * bytes);
    // order: writer: copies read partials, which other CTAs have stored and this thread has acquired
    fence_async_global();
    // order: refill: the factors of the merge before lie where copies write, if groups of splits are merged
    fence_async_shared();
    // A bulk copy takes its warp a hundred cycles to issue, so all warps issue some.
#pragma unroll 1
    for (int split = lane * kWarps + warp; split < from.count; split += kThreads) {
      const char* at = reinterpret_cast<const char*>(epilogue.partial_states(from.first + split * from.step));
      const int skip = kStates - states + row * epilogue.dim * 4;
      bulk_load(buffer + split * pitch + kStates - states, at + skip, bytes, full);
    }
    full.wait(phase);
    phase ^= 1;
    if (row == 0 && !epilogue.s.has_chunks()) compute_factors(epilogue, from, lane, warp);
  }

  // As an epilogue warp merges splits from global memory: chunks are merged by whoever arrives last.
  FI_DEVICE PartialOutput merged_in_order(const DecodeEpilogue& epilogue, const SplitRange& from, int r, int row,
                                          int x) const {
    constexpr int kUnroll = kChunkLoads;
    const char* at = buffer + kStates + ((r - row) * epilogue.dim + x) * 4;
    PartialOutput sum{kMinusInf, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll 1
    for (int first = 0; first < from.count; first += kUnroll) {
      float2 state[kUnroll];
      float4 value[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int split = min(first + i, from.count - 1);  // the last one a second time, unused
        state[i] = states(split)[r];
        value[i] = *reinterpret_cast<const float4*>(at + split * pitch);
      }
      DecodeEpilogue::add_splits(sum, state, value, from.count - first);
    }
    return sum;
  }

  FI_DEVICE PartialOutput merged(const DecodeEpilogue& epilogue, const SplitRange& from, int r, int row, int x) const {
    constexpr int kUnroll = 4;
    const char* at = buffer + kStates + ((r - row) * epilogue.dim + x) * 4;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int split = 0; split < from.count; split += kUnroll) {
#pragma unroll
      for (int i = split; i < split + kUnroll; ++i) {
        const int here = min(i, from.count - 1);  // the last one a second time, unused
        const float rescale = i < from.count ? states(here)[r].x : 0.f;
        const float4 y = *reinterpret_cast<const float4*>(at + here * pitch);
        sum.x += rescale * y.x, sum.y += rescale * y.y, sum.z += rescale * y.z, sum.w += rescale * y.w;
      }
    }
    return {totals[r].x, totals[r].y, sum};
  }

  // One warp per row, one lane per split.
  FI_DEVICE void compute_factors(const DecodeEpilogue& epilogue, const SplitRange& from, int lane, int warp) const {
#pragma unroll 1
    for (int r = warp; r < epilogue.rows; r += kWarps) {
      float row_max = kMinusInf, row_sum = 0.f;
#pragma unroll 1
      for (int split = lane; split < from.count; split += 32) row_max = fmaxf(row_max, states(split)[r].x);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, offset));
#pragma unroll 1
      for (int split = lane; split < from.count; split += 32) {
        float2& state = states(split)[r];
        state.x = softmax_exp2<CudaMath>(state.x, softmax_reference(row_max));
        row_sum += state.x * state.y;
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) row_sum += __shfl_xor_sync(0xffffffffu, row_sum, offset);
      if (lane == 0) totals[r] = make_float2(row_max, row_sum);
    }
    this->sync();
  }
};

}  // namespace fi
