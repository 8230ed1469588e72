// Constants of e4m3 values with a scale for each block of 128, max(|block|, kMinBlockMax) / kE4m3Max.
#pragma once

namespace fi {

constexpr float kE4m3Max = 448.f;       // largest finite e4m3 value
constexpr float kMinBlockMax = 1e-10f;  // so that the scale of zeros is finite, and so is its inverse

}  // namespace fi
