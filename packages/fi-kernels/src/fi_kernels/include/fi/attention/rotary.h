// Rotary position embedding applied to q and k on the fly, halves layout; shared by device and CPU code.
#pragma once
#include "fi/rope/rope.h"

namespace fi {

// Dimension d of dim is rotated together with d +- dim/2, by position / scale * theta^(-2 (d mod dim/2) / dim).
struct Rotary {
  int32_t enabled;
  RopeFrequencies frequencies;

  // The angle of a pair, k < dim/2, per position: a 64-bit fraction of a turn.
  FI_HOST_DEVICE uint64_t step(int32_t k) const { return frequencies.phase_step(frequencies.revolutions(k)); }
};

// The pair that dimension d of dim belongs to.
FI_HOST_DEVICE int32_t rotary_pair(int32_t d, int32_t dim) { return d < dim / 2 ? d : d - dim / 2; }

// Element d of a rotated row, whose elements `read(d)` gives unrotated; step is that of its pair. Positions may be
// negative: the product wraps by whole turns.
template <class Read>
FI_HOST_DEVICE float rotated(Read&& read, int32_t d, int32_t dim, int64_t position, uint64_t step) {
  const int32_t half = dim / 2;
  float cosine, sine;
  cos_sin_of_phase(static_cast<uint32_t>((static_cast<uint64_t>(position) * step) >> 32), &cosine, &sine);
  return read(d) * cosine + (d < half ? -sine : sine) * read(d < half ? d + half : d - half);
}

}  // namespace fi
