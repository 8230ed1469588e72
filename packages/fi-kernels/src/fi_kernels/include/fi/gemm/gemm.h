// The problem that all GEMM implementations solve: operands, groups, scales and strides; shared by host and device.
#pragma once
#include "fi/divisor.h"
#include "fi/types.h"

namespace fi {

constexpr int kGemmSplits = 4;        // CTAs of a cluster that share the k of a tile for any number of tokens, at most
constexpr int kGemmSmallMSplits = 8;  // those that share a tile of few tokens, at most

// Which rows of a meet which matrix of b.
enum class GemmRows : int32_t {
  kBatched,  // out[i] = a[i] b[i]^T; a single product is a batch of one
  kIndptr,   // rows row_groups[g] .. row_groups[g + 1] - 1 of the only a meet b[g]; row_groups: [batch + 1]
  kIndices,  // row r of the only a meets b[row_groups[r]], the same for 128 aligned rows; -1: none. row_groups: [m]
  kMasked,   // as kBatched, but only the first row_groups[i] rows of a[i] exist; row_groups: [batch]
};

// out = sum over k of a[i, k] b[j, k] with scales, plus bias. Strides are in elements.
//   without scales              out[i, j] = dot(a[i], b[j]) + bias[j]
//   scales of rows              out[i, j] = dot(a[i], b[j]) a_scale[i] b_scale[j] + bias[j]
//   scales of blocks of 128 k   dot(a[i], b[j]) is the sum over blocks t of
//                               dot(a[i, t], b[j, t]) a_scale[i / a_scale_rows, t] b_scale[j / b_scale_rows, t]
// A single scale of all rows has stride 0.
struct GemmProblem {
  void* out;                  // [batch, m, n]; for kIndptr and kIndices [m, n]
  const void* a;              // [batch, m, k]; for kIndptr and kIndices [m, k]
  const void* b;              // [matrices, n, k], K-major, or MN-major with b_k_stride
  const float* a_scale;       // null: ones
  const float* b_scale;       // null: ones
  const void* bias;           // [n], of the type of out; null: none
  const int32_t* row_groups;  // as GemmRows says
  const int32_t* b_indices;   // [batch]: group i meets b[b_indices[i]]; null: b[i]. Not for kIndices
  int64_t out_batch_stride, out_row_stride;
  int64_t a_batch_stride, a_row_stride;
  int64_t b_batch_stride, b_row_stride, b_k_stride;  // one of the last two is 1
  int64_t a_scale_batch_stride, a_scale_row_stride, a_scale_k_stride;
  int64_t b_scale_batch_stride, b_scale_row_stride, b_scale_k_stride;
  int32_t m, n, k, batch;  // batch: products or groups; also the matrices of b unless b_indices picks them
  int32_t matrices;
  int32_t a_scale_rows, b_scale_rows;  // rows of a block of 128 k that share a scale: 1 or 128
  GemmRows rows;
};

// The tiles of a batch: groups of group_m rows of tiles are walked column by column.
struct GemmRaster {
  int32_t all, tiles, m_tiles, n_tiles, group_m;  // all: of the batch; tiles: of a product
  Divisor by_tiles, by_group, by_rows, by_last;   // tiles, those of a group, group_m, rows of the last group
};

}  // namespace fi
