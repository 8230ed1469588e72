// Parameters of all_reduce, shared by launcher and device code.
#pragma once
#include "fi/comm/workspace.h"

namespace fi {

// What is written: the sum; or s = sum + residual_in, its norm (RMSNorm), and the norm in a quantized form.
enum ReduceOutput : int32_t {
  kReduceSum = 0,
  kReduceNorm = 1,
  kReduceE4m3 = 2,       // with a scale that the caller gives
  kReduceE2m1 = 3,       // blocks of 16 with e4m3 scales: NVFP4
  kReduceRowE4m3 = 4,    // an fp32 scale for each row
  kReduceGroupE4m3 = 5,  // a ue8m0 scale for each group of a row
};

// The scale of a row: its largest magnitude becomes 448, but nothing grows more than 448 * 512 times, as vLLM's
// dynamic_per_token_scaled_fp8_quant has it.
FI_HOST_DEVICE float row_e4m3_scale(float amax) {
  constexpr float least = 1.f / (448.f * 512.f);
  const float scale = amax / 448.f;
  return scale > least ? scale : least;
}
// The byte of a group's scale: words of four groups, of which `stride` lie between those of neighbouring groups.
FI_HOST_DEVICE int64_t group_scale_offset(int64_t row, int32_t group, int32_t stride) {
  return (static_cast<int64_t>(group / 4) * stride + row) * 4 + group % 4;
}

// How ranks exchange a message; the last is a reduce-scatter.
enum ReduceForm : int32_t { kOneShot = 1, kTwoShot = 2, kScatter = 3 };

// Rows are of the message: tokens if a norm follows, else pieces of a flat tensor, of which the last may be short. Of
// kScatter the message is this rank's slice.
struct AllReduceParams {
  CommParams comm;
  const void* input;  // [rows, d], contiguous, as are the other tensors
  void* out;          // the sum, or s; null: not wanted
  const void* residual_in;
  const void* weight;             // [d]
  const float* scale;             // one float; null: 1
  void* norm_out;                 // null: not wanted
  void* quant_out;                // e4m3 or e2m1
  void* scale_out;                // of blocks, rows or groups
  int64_t total;                  // vectors of 16 bytes of the message
  int64_t slice;                  // kScatter: vectors from one slice of the input to the next
  int32_t rows, vectors;          // vectors of a row
  int32_t used;                   // vectors that this call writes to a workspace
  int32_t first_row;              // of these rows in scale_out
  int32_t layout, scale_columns;  // of e2m1; of groups scale_columns is the stride
  int32_t group;                  // elements of a group
  int32_t early_trigger;          // 1: the next kernel may be scheduled when this one has sent its data
  float eps, inv_d;
  float weight_bias;  // added to the weight: 1 for Gemma
};

}  // namespace fi
