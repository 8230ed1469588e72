// The dynamic tile scheduler of batch decode: CTAs take dynamic work ranges from a counter in global memory.
#pragma once
#include "fi/attention/decode/batch_decode.h"
#include "fi/cuda/ptx/global.cuh"

namespace fi {

// By one thread of a CTA, until it returns -1 once. The last CTA to get -1 resets the counter for the next launch.
FI_DEVICE int take_dynamic_range(const BatchDecodeParams& params, const DecodeHeader& header) {
  if (header.dynamic_ranges == 0) return -1;
  int32_t& next = params.schedule.header().next_dynamic;
  const int i = atomicAdd(&next, 1);
  if (i == header.range_groups * header.dynamic_ranges + params.num_ctas - 1) next = 0;
  return header.dynamic_range(i);
}

}  // namespace fi
