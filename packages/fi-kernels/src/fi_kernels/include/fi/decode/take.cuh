// Who reads the later ranges of a schedule: whichever block asks first.
#pragma once
#include "fi/cuda/ptx/global.cuh"
#include "fi/decode/batch_decode.h"

namespace fi {

// By one thread of a block, until -1 once: that is how many asked for none. The last of them makes the counter ready
// for the next launch.
FI_DEVICE int take_range(const BatchDecodeParams& params, const DecodeHeader& header) {
  if (header.later == 0) return -1;
  int32_t& taken = params.view().header().taken;
  const int i = atomicAdd(&taken, 1);
  if (i == header.groups * header.later + params.blocks - 1) taken = 0;
  return header.later_range(i);
}

}  // namespace fi
