// ldmatrix (PTX ISA 9.7.14.5.15) and stmatrix (9.7.14.5.16): four 8x8 matrices of 16-bit elements from or to shared
// memory, one row address a lane; addresses are pointers or those of the shared window.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// Lane l gets elements (l/4, 2(l%4)) and the next of each matrix; lanes 8m .. 8m+7 give the 16-byte rows of matrix m.
FI_DEVICE void ldmatrix_x4(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
FI_DEVICE void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  ldmatrix_x4(r, static_cast<unsigned>(__cvta_generic_to_shared(row)));
}

// The same of the transposed matrices.
FI_DEVICE void ldmatrix_x4_trans(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
FI_DEVICE void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  ldmatrix_x4_trans(r, static_cast<unsigned>(__cvta_generic_to_shared(row)));
}

// The transposed matrix (PTX ISA 9.7.14.5.17): a lane gives elements (l/4, 2(l%4)) and the next, and gets those.
// NOTE: movmatrix_trans of movmatrix.cuh is the same, but volatile: with it ptxas orders batch_mla_swapped otherwise.
FI_DEVICE unsigned transposed_8x8(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// What ldmatrix_x4 reads; sm_90 and later.
FI_DEVICE void stmatrix_x4(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(row))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// The same of the transposed matrices: a row in memory is a column of the elements.
FI_DEVICE void stmatrix_x4_trans(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(row))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace fi
