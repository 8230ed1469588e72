// Parameters of the Hopper GEMM, shared by launcher and device code.
#pragma once
#include "fi/gemm/gemm.h"
#include "fi/tensor_map.h"

namespace fi {

// StoreTmaHalves takes whole passes through a ring of 512 k, and pays where a tile has few of them. H200, us without
// and with it: 8192 x 28672 x 2048 844 and 778, 8192 x 8192 x 2560 272 and 267, 4096 x 7168 x 3072 145 and 143, 4096 x
// 4096 x 4096 111.0 and 111.1, 8192 x 8192 x 8192 805 and 816.
constexpr int64_t kGemmHalvesStep = 512, kGemmHalvesK = 3072;

constexpr int kGemmBoxColumns = 16;  // of a transposed tile that TMA stores at a time

// All that a CTA may have: the registers of a tile leave room for no other CTA.
constexpr int kGemmSharedBytes = 227 * 1024;

// TMA reads a and b as [k or n, row, matrix]. A box is 128 bytes by the rows that one CTA loads of a
// tile. Tiles of out are stored from boxes of 128 bytes by 64 rows.
struct GemmSm90Params {
  TensorMap a, b, out;
  GemmProblem problem;
  int32_t k_blocks;               // of 128 bytes
  int32_t group_m;                // tiles along m of a group of the raster
  int32_t a_once;                 // no tile of a is loaded twice
  int32_t b_once;                 // no tile of b is loaded twice
  int32_t whole_rows;             // rows of out are aligned to 16 bytes
  int32_t tma_stores;             // whole tiles of out go through the map `out`
  int32_t last_row, last_column;  // that a tile of a batch may begin with
  int32_t b_constant;             // few tokens: b was complete before the kernel ahead in the stream began
  int32_t transposed;             // a is the weights and b the tokens of out, [n, m]
  // transposed: behind so many tiles of its own, a CTA shares the k of its last tile with those of its cluster, of
  // which each but the last has so many blocks of k, and sums so many groups of 16 columns.
  int32_t whole_tiles, splits, own_blocks, own_groups;
  // Of the mainloop that adds k in parts, `splits` is their number.
  GemmRaster raster;  // unless groups have sizes of their own
};

}  // namespace fi
