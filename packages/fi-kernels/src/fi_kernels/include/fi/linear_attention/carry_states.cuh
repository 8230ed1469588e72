// The part of chunk_gated_delta_rule that carries states from segment to segment, between two parallel parts.
#pragma once
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/linear_attention/chunk_tiles.cuh"
#include "fi/linear_attention/state_tile.cuh"

namespace fi {

// A CTA has 8 rows of the state of a sequence and head. In fp32: a thread multiplies them with a quarter of a column of
// M, which it reads while the previous segment is computed.
template <int kD>
struct CarryStates {
  static constexpr int kRows = 8, kParts = 4, kOwn = kRows / kParts, kSteps = kD / kParts, kSize = kD * kD;
  struct Shared {
    float4 state[kRows][kD / 4];
    float products[kParts][kRows][kD];
  };

  const ChunkGatedDeltaRuleParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const int unit = blockIdx.x / (kD / kRows), column = threadIdx.x % kD, part = threadIdx.x / kD;
    const int sequence = divide(unit, p.heads), head = unit - sequence * p.heads.value;
    const int row = blockIdx.x % (kD / kRows) * kRows + part * kOwn;  // of the rows that this thread adds up
    pdl_wait();
    pdl_launch_dependents();
    const int64_t first = TokenSpan::first_number(p, sequence, p.segment_tokens);
    const int64_t tokens = p.offsets.at(sequence + 1) - p.offsets.at(sequence);
    const int64_t segments = tokens > 0 ? divide(tokens + p.segment_tokens.value - 1, p.segment_tokens) : 1;
    float state[kOwn] = {}, added[kOwn], map[kSteps];
    const int64_t slot = p.slots.or_row(sequence);
    if (p.initial.data && slot >= 0) {
      const Numbers initial{p.initial.data, p.initial.type};
      const int64_t at = slot * p.initial.strides[0] + head * p.initial.strides[1] + column;
#pragma unroll
      for (int r = 0; r < kOwn; ++r) state[r] = number(initial, at + (row + r) * p.initial.strides[2]);
    }
    const auto load = [&](int64_t segment) {
      const float* maps = p.maps + ((first + segment) * p.heads.value + head) * 2 * kSize + column;
#pragma unroll
      for (int r = 0; r < kOwn; ++r) added[r] = maps[(row + r) * kD];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) map[i] = maps[kSize + (part * kSteps + i) * kD];
    };
    if (segments > 1) load(0);
    for (int64_t i = 0;; ++i) {
      float* carried = p.carried + ((first + i) * p.heads.value + head) * kSize + row * kD + column;
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        carried[r * kD] = state[r];
        reinterpret_cast<float*>(shared.state[part * kOwn + r])[column] = state[r];
        if (i + 1 < segments) state[r] = added[r];
      }
      if (i + 1 == segments) break;
      __syncthreads();
      float sums[kRows] = {};
#pragma unroll
      for (int k = 0; k < kSteps; k += 4)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 s = shared.state[r][(part * kSteps + k) / 4];
          sums[r] += s.x * map[k] + s.y * map[k + 1] + s.z * map[k + 2] + s.w * map[k + 3];
        }
      if (i + 2 < segments) load(i + 1);
#pragma unroll
      for (int r = 0; r < kRows; ++r) shared.products[part][r][column] = sums[r];
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kOwn; ++r)
#pragma unroll
        for (int other = 0; other < kParts; ++other) state[r] += shared.products[other][part * kOwn + r][column];
    }
  }
};

template <int kD, int kBytes>
FI_DEVICE void carry_states(const ChunkGatedDeltaRuleParams& p) {
  run_in_shared<CarryStates<kD>, 128, kBytes>(p);
}

}  // namespace fi
