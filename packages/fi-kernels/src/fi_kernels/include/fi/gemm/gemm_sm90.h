// Parameters of the Hopper GEMM, shared by launcher and device code.
#pragma once
#include "fi/gemm/gemm.h"
#include "fi/tensor_map.h"

namespace fi {

// TMA reads a and b as [k or n, row, matrix]. A box is 128 bytes by the rows that one CTA loads of a
// tile. Tiles of out are stored from boxes of 128 bytes by 64 rows.
struct GemmSm90Params {
  TensorMap a, b, out;
  GemmProblem problem;
  int32_t k_blocks;    // of 128 bytes
  int32_t group_m;     // tiles along m of a group of the raster
  int32_t b_once;      // no tile of b is loaded twice
  int32_t whole_rows;  // rows of out are aligned to 16 bytes
  int32_t tma_stores;  // whole tiles of out go through the map `out`
};

}  // namespace fi
