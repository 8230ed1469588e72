// The TMA tensor map (CUtensorMap): 128 opaque bytes that describe a tensor; the driver encodes them, TMA reads them.
#pragma once
#include "fi/types.h"

namespace fi {

struct alignas(64) TensorMap {
  uint64_t words[16];
};

}  // namespace fi
