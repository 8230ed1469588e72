// Where the attention kernels find the tokens of a request: page(j) times a page's stride plus slot(j) times a token's.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"
#include "fi/divisor.h"

namespace fi {

// Where keys lie that follow each other: token j in slot j of the only page.
struct OnePage {
  static constexpr int64_t k_page = 0, v_page = 0;
  FI_DEVICE int64_t page(int) const { return 0; }
  FI_DEVICE int slot(int j) const { return j; }
};

// Token j of a request lies in slot j % size of page ids[j / size].
struct PagedTokens {
  const int32_t* ids;
  Divisor size;
  int64_t k_page, v_page;
  FI_DEVICE int64_t page(int j) const { return ids[divide(j, size)]; }
  FI_DEVICE int slot(int j) const { return j - static_cast<int>(divide(j, size) * size.value); }
};

}  // namespace fi
