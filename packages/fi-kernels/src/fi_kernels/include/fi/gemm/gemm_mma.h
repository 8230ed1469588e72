// Parameters of the mma.sync GEMM, shared by launcher and device code.
#pragma once
#include "fi/gemm/gemm.h"

namespace fi {

struct GemmMmaParams {
  GemmProblem problem;
  int32_t k_stages;  // of 64 bytes
  int32_t group_m;   // tiles along m of a group of the raster
  int32_t last_row;  // that a tile of a batch may begin with
  int32_t pairs;     // pairs of columns of out are aligned
  GemmRaster raster;
};

}  // namespace fi
