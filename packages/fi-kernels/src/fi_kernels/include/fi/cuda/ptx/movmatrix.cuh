// movmatrix (PTX ISA 9.7.14.5.17): transposes an 8x8 matrix of 16-bit elements among the lanes of a warp, sm_75 and
// later.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// Lane l gives elements (l / 4, 2 (l % 4)) and the next, and gets those of the transposed matrix.
FI_DEVICE unsigned movmatrix_trans(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace fi
