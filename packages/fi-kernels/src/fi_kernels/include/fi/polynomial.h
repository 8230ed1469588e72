// polynomial(x, c2, c1, c0) = c2 x^2 + c1 x + c0 of any degree, by Horner's scheme.
#pragma once
#include "fi/types.h"

namespace fi {

template <class... C>
FI_HOST_DEVICE float polynomial(float x, float highest, C... lower) {
  ((highest = highest * x + lower), ...);
  return highest;
}

}  // namespace fi
