// What the launcher of the unit kernels of device building blocks hands to each of them.
#pragma once
#include "fi/tensor_map.h"

// a: [m, k]; b: [n, k], or [k, n] for wgmma_registers; out: [m, n]. All row-major. counters: two of the dynamic
// scheduler, then a visit count for each tile.
struct BlockParams {
  fi::TensorMap a_map, b_map;
  const void* a;
  float* out;
  fi::int32_t* counters;
  fi::int32_t m, n, group_m;
};
