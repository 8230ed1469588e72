// The description of a tensor for bulk tensor copies: 128 opaque bytes, encoded by the driver, read by the hardware.
#pragma once
#include "fi/types.h"

namespace fi {

struct alignas(64) TensorMap {
  uint64_t words[16];
};

}  // namespace fi
