// Rope with fp8 output on sm_80 and later: rotates q and k, converts v, and writes k and v to tensors or into pages.
#pragma once
#include "fi/rope/rope.cuh"
#include "fi/rope/rope_quantize.h"

namespace fi {

// Angles from the cos_sin cache.
template <class Layout>
struct CachedAngles {
  const RopeCommon& p;
  Layout layout;

  FI_DEVICE void prepare(PairAngles<Layout::kPairs>&) const {}
  FI_DEVICE int64_t position(int64_t row) const { return p.pos_ids.at(row); }
  FI_DEVICE void compute(int64_t position, PairAngles<Layout::kPairs>& angles) const {
    cached_angles(p, layout, position, angles);
  }
};

template <class T, class O, int kVec, int kUnroll, bool kInterleave>
FI_DEVICE void rope_quantize(const RopeQuantizeParams& p) {
#if __CUDA_ARCH__ >= 890
  constexpr int kHeadsUnrolled = kUnroll;
#else
  constexpr int kHeadsUnrolled = 1;  // before sm_89 the cast to fp8 is a hundred instructions of software
#endif
  const RopeThread thread(p.common);
  const CachedAngles<PairLayout<kVec, kInterleave>> source{p.common, {thread.lane, p.common.rotary_dim}};
  const auto row_offset = [&](int kind, const RopeOperand& operand, int64_t row) -> int64_t {
    if (kind == kRopeQ || !p.pages.batch_indices.data) return row * operand.out_row_stride;
    int64_t page, slot;
    return p.pages.find(row, &page, &slot) ? page * operand.out_page_stride + slot * operand.out_row_stride : -1;
  };
  rope_heads<T, O, kHeadsUnrolled, 3, kVec, kInterleave>(p.common, thread, source, row_offset);
}

}  // namespace fi
