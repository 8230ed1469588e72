// The parameters of the scale kernel.
#pragma once
#include "fi/types.h"

// out[i] = a * x[i] for i < n.
struct ScaleParams {
  float* out;
  const float* x;
  fi::int64_t n;
  float a;
};
